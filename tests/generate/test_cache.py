"""The cached forward pass is the uncached one, at every position, for rows of different lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.cache import empty_cache, forward_cached
from podling.model.gpt import forward, logits
from podling.model.spec import Params, init_params

CFG = ModelConfig(layers=3, heads=2, embed=32, mlp=128, context=48, vocab_size=61)


@pytest.fixture(scope="module")
def params() -> Params:
    """Random in every leaf, so that a bias or LayerNorm used in the wrong place shows."""
    leaves, tree = jax.tree.flatten(init_params(CFG, key=jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten(x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True))


@pytest.fixture(scope="module")
def sequences() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CFG.vocab_size, (3, CFG.context)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(params: Params, sequences: np.ndarray) -> np.ndarray:
    return np.asarray(logits(params, forward(params, jnp.asarray(sequences), CFG), CFG))


def assert_same_scores(got: np.ndarray, want: np.ndarray) -> None:
    want = want[..., : CFG.vocab_size]
    np.testing.assert_allclose(got[..., : CFG.vocab_size], want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("prompt", [1, 2, 17, 47, 48])
def test_prefill_then_decode_equals_forward_at_every_position(params, sequences, expected, prompt):
    cache = empty_cache(CFG, 3, CFG.context)
    run = jax.jit(lambda tokens, positions, cache: forward_cached(params, tokens, positions, cache, CFG))
    positions = jnp.broadcast_to(jnp.arange(prompt), (3, prompt))
    hidden, cache = run(jnp.asarray(sequences[:, :prompt]), positions, cache)
    assert_same_scores(np.asarray(logits(params, hidden, CFG)), expected[:, :prompt])
    for t in range(prompt, CFG.context):
        hidden, cache = run(jnp.asarray(sequences[:, t : t + 1]), jnp.full((3, 1), t), cache)
        assert_same_scores(np.asarray(logits(params, hidden, CFG)), expected[:, t : t + 1])


def test_rows_of_different_lengths_share_a_batch(params, sequences, expected):
    """Padding is poisoned with other tokens: what it leaves in the cache must never be seen."""
    lengths = np.array([1, 9, 20])
    width, cache = 20, empty_cache(CFG, 3, CFG.context)
    run = jax.jit(lambda tokens, positions, cache: forward_cached(params, tokens, positions, cache, CFG))
    padded = np.where(np.arange(width) < lengths[:, None], sequences[:, :width], 7)
    hidden, cache = run(jnp.asarray(padded), jnp.broadcast_to(jnp.arange(width), (3, width)), cache)
    scores = np.asarray(logits(params, hidden, CFG))
    for row, length in enumerate(lengths):
        assert_same_scores(scores[row, :length], expected[row, :length])
    for step in range(CFG.context - lengths.max()):
        at = lengths + step
        tokens = sequences[np.arange(3), at][:, None]
        hidden, cache = run(jnp.asarray(tokens), jnp.asarray(at)[:, None], cache)
        assert_same_scores(np.asarray(logits(params, hidden, CFG))[:, 0], expected[np.arange(3), at])


def test_a_prompt_may_be_read_in_pieces(params, sequences, expected):
    cache = empty_cache(CFG, 3, CFG.context)
    for start, stop in [(0, 5), (5, 30), (30, 31), (31, 48)]:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (3, stop - start))
        hidden, cache = forward_cached(params, jnp.asarray(sequences[:, start:stop]), positions, cache, CFG)
        assert_same_scores(np.asarray(logits(params, hidden, CFG)), expected[:, start:stop])
