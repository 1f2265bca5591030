"""The same model in PyTorch, by `transformers`, and how far the two are apart.

Used by the tests here and by bench/parity_table.py. Nothing of podling's mathematics is reused on the other side: the
loss, the schedule, the decay groups and the clipping are written again in PyTorch.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from podling.generate.decode import generate
from podling.generate.settings import Settings
from podling.interop.hf_config import hf_config
from podling.interop.names import PREFIX, to_hf
from podling.model.form import Form
from podling.model.gpt import forward, logits
from podling.model.loss import cross_entropy
from podling.model.spec import Leaf, Params, param_specs
from podling.train.optimizer import make_optimizer
from podling.train.step import DeviceBatch, TrainState, make_train_step

# A decay of 1.0, ten times the usual, so that a wrong decay group shows in three steps.
STEPS = 3
ADAMW_TOLERANCE = 2e-4  # of the leaf's largest value
OPTIMIZER = OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2, weight_decay=1.0, beta2=0.95, clip_norm=0.5)
SCHEDULE_STEPS = 10
KEY_BIAS = "attn.c_attn.bias"  # its middle third: adding one vector to every key changes no attention weight


@dataclass(frozen=True)
class Differences:
    """Largest differences; gradients and parameters as shares of their leaf's largest value."""

    logits: float
    loss: float
    gradients: dict[str, float]
    adamw: dict[str, float]
    """After three steps, the key bias left out."""
    adamw_over: int
    """Single numbers more than `ADAMW_TOLERANCE` apart, the key bias left out."""
    key_bias_gradient: float
    """Largest gradient of a key bias over the largest of its leaf, on either side: it is zero but for rounding."""
    clipped: bool
    """Whether clipping was at work in every step."""
    greedy: bool
    """Whether greedy decoding gave the same tokens for every prompt."""
    greedy_tokens: int
    parameters: int

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1])

    @property
    def worst_adamw(self) -> tuple[str, float]:
        return max(self.adamw.items(), key=lambda item: item[1])


def random_params(cfg: ModelConfig, seed: int) -> Params:
    """Every leaf away from its initial value, so that no bias or LayerNorm is trivially right; padding rows zero.

    Matrices keep the scale of what goes through them, so that GELU and softmax are at work away from zero.
    """
    rng = np.random.default_rng(seed)

    def draw(leaf: Leaf) -> np.ndarray:
        centre = 1.0 if leaf.init == "ones" else 0.0
        return centre + cfg.embed**-0.5 * rng.standard_normal(leaf.shape, np.float32)

    params = jax.tree.map(draw, param_specs(cfg))
    params.token_embed[cfg.vocab_size :] = 0
    return jax.tree.map(jnp.asarray, params)


def torch_model(params: Params, cfg: ModelConfig) -> GPT2LMHeadModel:
    """`transformers`' own GPT-2 with these weights."""
    model = GPT2LMHeadModel(GPT2Config(**hf_config(cfg, eot_id=cfg.vocab_size - 1), attn_implementation="eager"))
    tensors = {PREFIX + name: torch.from_numpy(array.copy()) for name, array in to_hf(params, cfg).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    assert model.lm_head.weight is model.transformer.wte.weight
    return model.eval()  # no dropout


def compare(
    cfg: ModelConfig,
    *,
    rows: int,
    length: int,
    seed: int,
    train: TrainConfig | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Differences:
    """Everything the two models are compared in, on random data with random weights per position.

    Args:
        cfg: dropout 0.
        rows: sequences in a batch.
        length: tokens in a sequence.
        seed: of parameters and data.
        train: remat and loss_chunk; they must not show.
        optimizer: for the AdamW steps of both.
    """
    rng = np.random.default_rng(seed + 1)
    shape = (STEPS, rows, length)
    inputs, targets = (rng.integers(0, cfg.vocab_size, shape).astype(np.int32) for _ in range(2))
    weights = (rng.random(shape) < 0.8).astype(np.float32) * rng.choice([0.5, 1.0, 2.0], shape).astype(np.float32)
    params, train = random_params(cfg, seed), train or TrainConfig()
    model = torch_model(params, cfg)

    want_logits = model(torch.from_numpy(inputs[0]).long()).logits
    ours = jax.jit(lambda params, ids: logits(params, forward(params, ids, cfg), cfg))(params, inputs[0])
    logits_difference = np.abs(np.asarray(ours)[..., : cfg.vocab_size] - want_logits.detach().numpy()).max()

    loss, gradients = _own_gradients(params, cfg, train, inputs[0], targets[0], weights[0])
    want_loss = _torch_loss(model, inputs[0], targets[0], weights[0])
    want_loss.backward()
    want_gradients = {name: p.grad.numpy() for name, p in _named(model)}
    greedy, greedy_tokens = _greedy(params, model, cfg, rng)

    model.zero_grad()
    clipped = _torch_adamw(model, optimizer, inputs, targets, weights)
    stepped = _own_adamw(params, cfg, train, optimizer, inputs, targets, weights)
    want_stepped = {name: p.detach().numpy() for name, p in _named(model)}
    return Differences(
        logits=float(logits_difference),
        loss=abs(loss - want_loss.item()),
        gradients={name: _share(gradients[name], want) for name, want in want_gradients.items()},
        adamw={name: _share(_no_key(name, stepped[name]), _no_key(name, w)) for name, w in want_stepped.items()},
        adamw_over=sum(_over(_no_key(name, stepped[name]), _no_key(name, w)) for name, w in want_stepped.items()),
        key_bias_gradient=max(
            _key_share(g, name) for g in (gradients, want_gradients) for name in g if KEY_BIAS in name
        ),
        clipped=clipped,
        greedy=greedy,
        greedy_tokens=greedy_tokens,
        parameters=sum(p.numel() for _, p in _named(model)),
    )


def _named(model: GPT2LMHeadModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.removeprefix(PREFIX), p) for name, p in model.named_parameters()]


def _share(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _over(ours: np.ndarray, theirs: np.ndarray) -> int:
    return int((np.abs(ours - theirs) > ADAMW_TOLERANCE * np.abs(theirs).max()).sum())


def _key_share(gradients: dict[str, np.ndarray], name: str) -> float:
    _, key, _ = np.split(gradients[name], 3)
    return float(np.abs(key).max() / np.abs(gradients[name]).max())


def _no_key(name: str, array: np.ndarray) -> np.ndarray:
    if KEY_BIAS not in name:
        return array
    query, _, value = np.split(array, 3)
    return np.concatenate([query, value])


def _own_gradients(params, cfg, train, inputs, targets, weights) -> tuple[float, dict[str, np.ndarray]]:
    def loss(params):
        hidden = forward(params, inputs, cfg, form=Form.of(train))
        nll, count = cross_entropy(params, hidden, targets, weights, cfg, chunk=Form.of(train).loss_chunk)
        return nll / count

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), to_hf(gradients, cfg)


def _torch_loss(model, inputs, targets, weights) -> torch.Tensor:
    scores = model(torch.from_numpy(inputs).long()).logits
    nll = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), torch.from_numpy(targets).long().flatten(), reduction="none"
    )
    weights = torch.from_numpy(weights).flatten()
    return (nll * weights).sum() / weights.sum()


def _torch_lr(o: OptimizerConfig, step: int) -> float:
    """Update number `step` (from 0): linear warm-up, then a cosine down to a tenth."""
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    done = (step - o.warmup_steps) / (SCHEDULE_STEPS - o.warmup_steps)
    return o.lr * (o.lr_floor + (1 - o.lr_floor) * 0.5 * (1 + math.cos(math.pi * done)))


def _torch_adamw(model, o: OptimizerConfig, inputs, targets, weights) -> bool:
    parameters = [p for _, p in _named(model)]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (o.beta1, o.beta2)
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=betas, eps=o.eps)
    clipped = True
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _torch_lr(o, step)
        optimizer.zero_grad()
        _torch_loss(model, inputs[step], targets[step], weights[step]).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, o.clip_norm)
        clipped &= norm.item() > o.clip_norm
        optimizer.step()
    return clipped


def _own_adamw(params, cfg, train, optimizer, inputs, targets, weights) -> dict[str, np.ndarray]:
    """The step that training runs, jitted and donated as there."""
    train = TrainConfig(steps=SCHEDULE_STEPS, remat=train.remat, loss_chunk=train.loss_chunk)
    config = Config(model=cfg, optimizer=optimizer, train=train)
    step = jax.jit(make_train_step(config, jnp.float32), donate_argnums=0)
    state = TrainState(jnp.int32(0), params, make_optimizer(optimizer, cfg, SCHEDULE_STEPS).init(params))
    for i in range(STEPS):
        batch = DeviceBatch(*(jnp.asarray(x[i][None]) for x in (inputs, targets, weights)))
        state, _ = step(state, batch)
    return to_hf(state.params, cfg)


def _greedy(params, model, cfg, rng) -> tuple[bool, int]:
    """Tokens after prompts of several lengths, ours in one batch, theirs one by one."""
    end, new = cfg.vocab_size - 1, min(12, cfg.context // 2)
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in (1, 2, cfg.context // 2)]
    ours: list[list[int]] = [[] for _ in prompts]
    for event in generate(params, cfg, prompts, Settings(max_tokens=new, temperature=0.0), end_id=end):
        ours[event.row] += event.ids
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=end
        )[0, len(prompt) :].tolist()
        theirs.append(out[: out.index(end)] if end in out else out)
    return ours == theirs, sum(map(len, theirs))
