"""Evaluation as a sum and a count: equal to a loop over windows, however they are cut into batches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.data.batches import EvalWindows
from podling.model.form import Form
from podling.model.gpt import forward, logits
from podling.model.spec import init_params
from podling.parallel.mesh import make_mesh
from podling.train.evaluate import EvalResult, Evaluator

pytestmark = pytest.mark.usefixtures("quick_compile")

CFG = ModelConfig(layers=1, heads=2, embed=16, mlp=16, context=8, vocab_size=40, dropout=0.5)
WINDOWS = 7


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: jax.tree.map(lambda x: 10 * x, init_params(CFG, key=jax.random.key(0))))()


@pytest.fixture(scope="module")
def windows() -> EvalWindows:
    """The last window holds three tokens and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CFG.vocab_size, (WINDOWS, CFG.context + 1)).astype(np.int32)
    weights = np.ones((WINDOWS, CFG.context), np.float32)
    weights[-1, 3:] = 0
    return EvalWindows(tokens[:, :-1], tokens[:, 1:], weights, bytes=123)


@pytest.fixture(scope="module")
def by_hand(params, windows) -> float:
    """Token by token, from log-probabilities in float64."""
    total = 0.0
    scores = jax.jit(lambda tokens: logits(params, forward(params, tokens, CFG), CFG))
    for row, targets, weights in zip(windows.inputs, windows.targets, windows.weights, strict=True):
        exact = np.asarray(scores(jnp.asarray(row[None])), np.float64)[0, :, : CFG.vocab_size]
        for place in np.flatnonzero(weights):
            total += np.log(np.exp(exact[place]).sum()) - exact[place, targets[place]]
    return total


@pytest.mark.parametrize(
    ("mesh", "rows", "chunk"), [("data=1", 1, 0), ("data=1", 3, 4), ("data=1", 7, 0), ("data=4,tensor=2", 8, 0)]
)
def test_any_cut_into_batches_gives_the_sum_over_windows(params, windows, by_hand, mesh, rows, chunk):
    """7 windows by 3 and by 8 leave a last batch that is filled up; dropout plays no part."""
    mesh = make_mesh(mesh, jax.devices()[:1] if mesh == "data=1" else jax.devices())
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
        evaluate = Evaluator(CFG, windows, mesh, rows=rows, dtype=jnp.float32, form=Form(loss_chunk=chunk))
        result = evaluate(placed)
        assert evaluate(placed) == result
    np.testing.assert_allclose(result.nll_sum, by_hand, rtol=1e-6)
    assert (result.tokens, result.bytes) == (6 * 8 + 3, 123)


def test_a_long_evaluation_says_how_far_it_is(params, windows):
    mesh, told = make_mesh("data=1", jax.devices()[:1]), []
    with jax.set_mesh(mesh):
        evaluate = Evaluator(CFG, windows, mesh, rows=1, dtype=jnp.float32, form=Form())
        evaluate(jax.device_put(params, jax.NamedSharding(mesh, jax.P())), told.append)
    assert len(told) >= 2 and len(set(told)) == len(told)


def test_what_people_read_from_sum_and_count():
    result = EvalResult(nll_sum=200.0, tokens=100, bytes=400)
    assert result.loss == 2.0 and result.perplexity == pytest.approx(math.exp(2))
    assert result.bits_per_byte == pytest.approx(200 / math.log(2) / 400)
    assert result.record() == {
        "val_loss": 2.0,
        "val_perplexity": pytest.approx(math.exp(2)),
        "val_bits_per_byte": pytest.approx(0.7213475),
        "val_tokens": 100,
    }


def test_a_lost_model_has_a_huge_perplexity_and_no_overflow():
    assert math.isfinite(EvalResult(nll_sum=1e6, tokens=100, bytes=1).perplexity)
