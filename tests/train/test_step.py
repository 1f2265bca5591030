"""The training step: exact accumulation, one trace, donation, and a state that no bad batch can spoil."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from podling.run.checkpoint import hash_state
from podling.train.retrace import TraceCounter
from podling.train.step import (
    DeviceBatch,
    TrainState,
    dropout_key,
    init_state,
    make_train_step,
    sum_gradients,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig(layers=2, heads=2, embed=16, mlp=32, context=8, vocab_size=50)
CONFIG = Config(
    model=MODEL,
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, schedule="linear", clip_norm=0.5),
    train=TrainConfig(steps=20),
)
DROPPING = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, dropout=0.3))


def batch(seed: int, micro_steps: int = 1, rows: int = 4, context: int = MODEL.context) -> DeviceBatch:
    """Four rows of random tokens; the weights are far from even."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, context + 1)).astype(np.int32)
    weights = rng.choice([0.0, 0.1, 1.0, 7.0], (rows, context), p=[0.5, 0.2, 0.2, 0.1]).astype(np.float32)
    shape = (micro_steps, rows // micro_steps, context)
    return DeviceBatch(*(jnp.asarray(x.reshape(shape)) for x in (tokens[:, :-1], tokens[:, 1:], weights)))


class Compiled:
    """A step that counts its traces and does not consume what it is given, so that tests may share a state."""

    def __init__(self, config: Config, dtype: Any = jnp.float32):
        self.counter = TraceCounter(make_train_step(config, dtype))
        self.jitted = jax.jit(self.counter, donate_argnums=0)

    def __call__(self, state: TrainState, batch: DeviceBatch):
        return self.jitted(jax.tree.map(jnp.copy, state), batch)


@pytest.fixture(scope="module")
def initial(quick_compile) -> TrainState:
    return jax.jit(lambda: init_state(CONFIG))()


@pytest.fixture(scope="module")
def start(initial) -> TrainState:
    """Parameters large enough that the model is not nearly linear."""
    return dataclasses.replace(initial, params=jax.tree.map(lambda leaf: leaf * 5 + 0.01, initial.params))


@pytest.fixture(scope="module")
def gradients():
    return jax.jit(lambda params, batch: sum_gradients(params, batch, CONFIG, jnp.float32, None))


@pytest.fixture(scope="module")
def step(quick_compile) -> Compiled:
    return Compiled(CONFIG)


@pytest.fixture(scope="module")
def dropping(quick_compile) -> Compiled:
    return Compiled(DROPPING)


def named(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("micro_steps", [2, 4])
def test_accumulation_is_the_big_batch(start, gradients, micro_steps):
    """Each micro-batch has another sum of weights, so a mean of means would be far off."""
    whole, cut = gradients(start.params, batch(0)), gradients(start.params, batch(0, micro_steps))
    sums = np.asarray(batch(0, micro_steps).weights).sum((1, 2))
    assert sums.max() > 1.3 * sums.min()
    np.testing.assert_allclose(cut[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(cut[1], whole[1], rtol=1e-6)
    for name, value in named(whole[2]).items():
        other = named(cut[2])[name]
        if "qkv_bias" in name:  # the key bias has no gradient but rounding
            assert np.abs(other[:, 1]).max() < 1e-5 * np.abs(other).max()
            value, other = value[:, [0, 2]], other[:, [0, 2]]
        np.testing.assert_allclose(other, value, atol=1e-6 * np.abs(value).max(), err_msg=name)


def test_the_loss_is_the_mean_over_the_weights(start, gradients, step):
    nll, count, _ = gradients(start.params, batch(0))
    _, metrics = step(start, batch(0))
    np.testing.assert_allclose(metrics.loss, nll / count, rtol=1e-6)
    np.testing.assert_allclose(count, np.asarray(batch(0).weights).sum(), rtol=1e-6)


def test_a_step_is_clipped_adamw_of_its_gradient(start, gradients, step):
    """One whole step against NumPy, from the step's own gradient to its new parameters and moments."""
    _, count, grads = gradients(start.params, batch(0))
    grads = {name: np.asarray(leaf, np.float64) / float(count) for name, leaf in named(grads).items()}
    norm = np.sqrt(sum((leaf**2).sum() for leaf in grads.values()))
    state, metrics = step(start, batch(0))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    assert norm > 2 * CONFIG.optimizer.clip_norm
    np.testing.assert_allclose(metrics.lr, 0.005, rtol=1e-6)  # the first of two warm-up steps
    before, after = named(start.params), named(state.params)
    mu = named(optax.tree_utils.tree_get(state.opt_state, "mu"))
    nu = named(optax.tree_utils.tree_get(state.opt_state, "nu"))
    for name, value in before.items():
        clipped = grads[name] * CONFIG.optimizer.clip_norm / norm
        scale = np.abs(clipped).max()
        np.testing.assert_allclose(mu[name], 0.1 * clipped, atol=1e-5 * scale, err_msg=name)
        np.testing.assert_allclose(nu[name], 0.05 * clipped**2, atol=1e-5 * scale**2, err_msg=name)
        decay = 0.1 if name.endswith(("_kernel", "_embed")) else 0.0
        expected = value - 0.005 * (clipped / (np.abs(clipped) + 1e-8) + decay * value)
        solid = np.abs(clipped) > 1e-6  # where the gradient is more than rounding
        np.testing.assert_allclose(after[name][solid], expected[solid], atol=1e-4 * 0.005, rtol=1e-6, err_msg=name)
    assert int(state.step) == 1


def test_the_rate_follows_the_schedule(start, step):
    state, rates = start, []
    for index in range(4):
        state, metrics = step(state, batch(index))
        rates.append(float(metrics.lr))
    np.testing.assert_allclose(rates, [0.005, 0.01, 0.01, 0.0095], rtol=1e-5)


def test_a_second_call_does_not_trace_again(initial):
    counter = TraceCounter(make_train_step(CONFIG, jnp.float32))
    step = jax.jit(counter, donate_argnums=0)
    state = jax.tree.map(jnp.copy, initial)
    for index in range(3):
        state, _ = step(state, batch(index))
    assert counter.retraces == 0 and counter.last_change() == ""
    step.trace(state, batch(0, context=4))
    assert counter.retraces == 1
    change = counter.last_change()
    assert all(f"[1].{name}: " in change for name in ("inputs", "targets", "weights"))
    assert "int32[1,4,8] -> int32[1,4,4]" in change and "params" not in change


def test_the_state_is_donated(initial, step):
    state = jax.tree.map(jnp.copy, initial)
    step.jitted(state, batch(0))
    alive = [name for name, leaf in _paths(state) if not leaf.is_deleted()]
    assert alive == []


def _paths(tree):
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def infinite_weight(state: TrainState) -> tuple[TrainState, DeviceBatch]:
    return state, dataclasses.replace(batch(0), weights=batch(0).weights.at[0, 1, 2].set(jnp.inf))


def no_weight(state: TrainState) -> tuple[TrainState, DeviceBatch]:
    return state, dataclasses.replace(batch(0), weights=jnp.zeros_like(batch(0).weights))


def infinite_parameter(state: TrainState) -> tuple[TrainState, DeviceBatch]:
    bias = state.params.final_bias.at[3].set(jnp.inf)
    return dataclasses.replace(state, params=dataclasses.replace(state.params, final_bias=bias)), batch(0)


def infinite_gradient(state: TrainState) -> tuple[TrainState, DeviceBatch]:
    """A finite loss: logits of modest size, as products of huge hidden states and a tiny table."""
    params = dataclasses.replace(
        state.params, final_scale=state.params.final_scale * 1e22, token_embed=state.params.token_embed * 1e-24
    )
    return dataclasses.replace(state, params=params), batch(0)


@pytest.mark.parametrize("cause", [infinite_weight, no_weight, infinite_parameter, infinite_gradient])
def test_a_step_that_is_not_finite_changes_nothing(start, step, cause):
    used, _ = step(start, batch(5))  # moments and count are not zero
    state, bad = cause(used)
    after, metrics = step(state, bad)
    assert not bool(metrics.finite)
    assert bool(jnp.isfinite(metrics.loss)) == (cause is infinite_gradient)
    assert hash_state(after) == hash_state(state)
    good, metrics = step(used, batch(6))
    assert bool(metrics.finite) and hash_state(good) != hash_state(used)


def test_padding_rows_stay_zero(initial, step):
    state = initial
    for index in range(3):
        state, _ = step(state, batch(index))
    for tree in (state.params, *(optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu"))):
        table = np.asarray(tree.token_embed)
        assert (table[MODEL.vocab_size :] == 0).all() and (table[: MODEL.vocab_size] != 0).any(-1).all()


def test_dropout_is_a_function_of_seed_and_step(start, dropping):
    loss = [float(dropping(start, batch(0))[1].loss) for _ in range(2)]
    assert loss[0] == loss[1]
    later = dataclasses.replace(start, step=start.step + 1)
    assert float(dropping(later, batch(0))[1].loss) != loss[0]
    keys = {
        tuple(jax.random.key_data(dropout_key(config, jnp.int32(step))).tolist())
        for config in (DROPPING, dataclasses.replace(DROPPING, train=TrainConfig(seed=1)))
        for step in range(3)
    }
    assert len(keys) == 6


def test_dropout_differs_between_micro_batches(start):
    """The same two rows twice: with one key for both, the sum would be twice the one."""
    one = batch(0, rows=2)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    gradients = jax.jit(lambda batch: sum_gradients(start.params, batch, DROPPING, jnp.float32, jax.random.key(0))[0])
    assert abs(float(gradients(twice)) / (2 * float(gradients(one))) - 1) > 1e-3


def test_a_step_without_dropout_draws_nothing():
    state = jax.eval_shape(lambda: init_state(CONFIG))
    with_key, without = (
        str(jax.make_jaxpr(make_train_step(c, jnp.float32))(state, batch(0))) for c in (DROPPING, CONFIG)
    )
    assert "random_bits" in with_key and "random" not in without


def test_bfloat16_keeps_master_weights_moments_and_loss_in_float32(start, step):
    half = Compiled(CONFIG, jnp.bfloat16)
    state, metrics = half(start, batch(0))
    floats = {leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")} and metrics.loss.dtype == jnp.float32
    exact = step(start, batch(0))[1].loss
    assert metrics.loss != exact
    np.testing.assert_allclose(metrics.loss, exact, rtol=0.02)


GOLDEN = [
    3.9035883, 3.8538876, 3.6587214, 3.5188317, 3.3577850,
    3.2098744, 3.0991631, 2.9954545, 2.8860228, 2.8140919,
]  # fmt: skip


def test_ten_steps_on_known_text_have_known_losses(initial, step):
    """The whole of initialisation, model, loss, schedule and optimizer, pinned.

    Update GOLDEN from the message below only for a change that is meant to change the numbers, and say so in the
    CHANGELOG: runs cannot be continued across it.
    """
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijkl", k=draw.randint(2, 5))) for _ in range(20)]
    text = " ".join(draw.choices(words, k=400))
    ids = np.array([" abcdefghijkl".index(letter) for letter in text], np.int32)
    state, losses = initial, []
    for index in range(10):
        rows = np.stack([ids[start : start + 9] for start in range(36 * index, 36 * index + 36, 9)])[None]
        cut = DeviceBatch(rows[..., :-1], rows[..., 1:], np.ones(rows[..., 1:].shape, np.float32))
        state, metrics = step(state, cut)
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(np.log(MODEL.vocab_size), abs=0.05) and losses[-1] < losses[0] - 0.5
    np.testing.assert_allclose(
        losses, GOLDEN, rtol=1e-5, err_msg=f"GOLDEN would now be {losses}; see this test's docstring"
    )
