"""The optimizer against AdamW written in NumPy: decay groups, clipping and schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig, OptimizerConfig
from podling.model.spec import Params, param_specs
from podling.train.optimizer import make_optimizer

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig(layers=2, heads=2, embed=4, mlp=8, context=4, vocab_size=7)
STEPS = 4


def names(tree) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def drawn(rng: np.random.Generator, scale: float) -> Params:
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32), param_specs(MODEL))


def adamw(params, grads, cfg: OptimizerConfig, lr_at) -> dict[str, np.ndarray]:
    """Loshchilov & Hutter 2019, algorithm 2, with the gradient scaled down to `clip_norm` first."""
    params = dict(params)
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step, grad in enumerate(grads):
        norm = np.sqrt(sum((value**2).sum() for value in grad.values()))
        scale = min(1.0, cfg.clip_norm / norm) if cfg.clip_norm else 1.0
        for name, value in params.items():
            g = grad[name] * scale
            first[name] = cfg.beta1 * first[name] + (1 - cfg.beta1) * g
            second[name] = cfg.beta2 * second[name] + (1 - cfg.beta2) * g * g
            m_hat = first[name] / (1 - cfg.beta1 ** (step + 1))
            v_hat = second[name] / (1 - cfg.beta2 ** (step + 1))
            decay = cfg.weight_decay if "kernel" in name or "embed" in name else 0.0
            params[name] = value - lr_at(step) * (m_hat / (np.sqrt(v_hat) + cfg.eps) + decay * value)
    return params


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_adamw_against_numpy(clip_norm):
    cfg = OptimizerConfig(
        lr=0.03, schedule="linear", warmup_steps=2, lr_floor=0.5, weight_decay=0.3, clip_norm=clip_norm,
        beta1=0.8, beta2=0.9, eps=1e-3,
    )  # fmt: skip
    optimizer = make_optimizer(cfg, MODEL, STEPS)
    rng = np.random.default_rng(0)
    params, *grads = (drawn(rng, scale) for scale in (1.0, *(10.0**-step for step in range(STEPS))))
    before, state = names(params), optimizer.init(params)

    @jax.jit
    def update(params, state, grad):
        updates, state = optimizer.update(grad, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for grad in grads:
        params, state = update(params, state, grad)

    def lr_at(step: int) -> float:  # two steps up, then from the peak halfway to half of it
        return [0.015, 0.03, 0.03, 0.0225][step]

    expected = adamw(before, [names(grad) for grad in grads], cfg, lr_at)
    for name, value in names(params).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-6, err_msg=name)
        assert np.abs(value - before[name]).max() > 0.01


def test_biases_and_layer_norm_do_not_decay():
    """No gradient at all: what moves has decayed."""
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, warmup_steps=0, weight_decay=0.5), MODEL, 10)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), param_specs(MODEL))
    still = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda params: optimizer.update(still, optimizer.init(params), params)[0])(params)
    for name, update in names(updates).items():
        expected = -0.05 if name.endswith(("_kernel", "_embed")) else 0.0
        np.testing.assert_allclose(update, expected, rtol=1e-5, err_msg=name)
