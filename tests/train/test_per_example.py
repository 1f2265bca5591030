"""Per-example losses and gradient norms: equal to a loop over examples, and their sum to the batch's loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.gpt import forward
from podling.model.loss import cross_entropy
from podling.model.spec import init_params
from podling.train.per_example import score_windows

pytestmark = pytest.mark.usefixtures("quick_compile")

CFG = ModelConfig(layers=2, heads=2, embed=16, mlp=32, context=8, vocab_size=40)
WINDOWS = 6
BEGINS = [True, True, False, False, True, True]
"""Documents of 1, 3, 1 and 1 windows."""


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: jax.tree.map(lambda x: 3 * x, init_params(CFG, key=jax.random.key(0))))()


@pytest.fixture(scope="module")
def windows():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CFG.vocab_size, (WINDOWS, CFG.context + 1)).astype(np.int32)
    weights = np.ones((WINDOWS, CFG.context), np.float32)
    weights[3, 5:] = weights[5, 2:] = 0  # ends of documents
    return tokens[:, :-1], tokens[:, 1:], weights


@jax.jit
def batch_loss(params, inputs, targets, weights):
    return cross_entropy(params, forward(params, inputs, CFG), targets, weights, CFG)[0]


@pytest.fixture(scope="module")
def by_loop(params, windows):
    """Losses, and norms of document gradients up to each window, from one ordinary gradient at a time, in float64."""
    gradient = jax.jit(jax.value_and_grad(batch_loss))
    losses, norms, total = [], [], None
    for begin, *window in zip(BEGINS, *(x[:, None] for x in windows), strict=True):
        loss, grad = gradient(params, *window)
        flat = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grad)])
        total = flat if begin or total is None else total + flat
        losses.append(float(loss))
        norms.append(np.linalg.norm(total))
    return losses, norms


@pytest.mark.parametrize(("at_once", "chunk"), [(2, 4), (6, 0)])
def test_equal_to_a_loop_and_to_the_batch(params, windows, by_loop, at_once, chunk):
    """However many go through in one call: a document goes on in the next."""
    score = jax.jit(partial(score_windows, cfg=CFG, loss_chunk=chunk))
    running = jax.tree.map(jnp.zeros_like, params)
    losses, norms = [], []
    for start in range(0, WINDOWS, at_once):
        piece = [x[start : start + at_once] for x in (np.array(BEGINS), *windows)]
        running, *found = score(params, running, *piece)
        losses += found[0].tolist()
        norms += found[1].tolist()
    np.testing.assert_allclose(losses, by_loop[0], rtol=2e-6)
    np.testing.assert_allclose(norms, by_loop[1], rtol=5e-6)
    np.testing.assert_allclose(sum(losses), float(batch_loss(params, *windows)), rtol=1e-6)
