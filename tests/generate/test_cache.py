"""The cached forward pass is the uncached one, at every position, for rows of different lengths."""

import jax
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.cache import empty_cache, forward_cached, layers_apart
from podling.model.gpt import forward, logits
from podling.model.spec import Params

CFG = ModelConfig(layers=3, heads=2, embed=32, mlp=128, context=48, vocab_size=61)


@pytest.fixture(scope="module")
def params(draw_params) -> Params:
    return draw_params(CFG, 0.2)


@pytest.fixture(scope="module")
def sequences() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CFG.vocab_size, (3, CFG.context)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(params: Params, sequences: np.ndarray) -> np.ndarray:
    scores = jax.jit(lambda tokens: logits(params, forward(params, tokens, CFG), CFG))
    return np.asarray(scores(sequences))


@pytest.fixture(scope="module")
def step(params: Params):
    """Scores of these tokens, and the cache with them in it."""

    apart = layers_apart(params, CFG)

    def run(tokens, starts, cache):
        hidden, cache = forward_cached(apart, tokens, starts, cache, CFG)
        return logits(params, hidden, CFG), cache

    return jax.jit(run)


def assert_same_scores(got: np.ndarray, want: np.ndarray) -> None:
    want = want[..., : CFG.vocab_size]
    np.testing.assert_allclose(got[..., : CFG.vocab_size], want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("prompt", [1, 17, 47, 48])
def test_prefill_then_decode_equals_forward_at_every_position(step, sequences, expected, prompt):
    cache = empty_cache(CFG, 3, CFG.context)
    scores, cache = step(sequences[:, :prompt], np.zeros(3, int), cache)
    assert_same_scores(np.asarray(scores), expected[:, :prompt])
    for t in range(prompt, CFG.context):
        scores, cache = step(sequences[:, t : t + 1], np.full(3, t), cache)
        assert_same_scores(np.asarray(scores), expected[:, t : t + 1])


def test_rows_of_different_lengths_share_a_batch(step, sequences, expected):
    """Padding is poisoned with other tokens: what it leaves in the cache must never be seen."""
    lengths, width = np.array([1, 9, 17]), 17
    padded = np.where(np.arange(width) < lengths[:, None], sequences[:, :width], 7).astype(np.int32)
    scores, cache = step(padded, np.zeros(3, int), empty_cache(CFG, 3, CFG.context))
    for row, length in enumerate(lengths):
        assert_same_scores(np.asarray(scores)[row, :length], expected[row, :length])
    for later in range(CFG.context - width):
        at = lengths + later
        scores, cache = step(sequences[np.arange(3), at][:, None], at, cache)
        assert_same_scores(np.asarray(scores)[:, 0], expected[np.arange(3), at])


def test_a_prompt_may_be_read_in_pieces(step, sequences, expected):
    cache = empty_cache(CFG, 3, CFG.context)
    for start, stop in [(0, 17), (17, 18), (18, 35), (35, 36)]:
        scores, cache = step(sequences[:, start:stop], np.full(3, start), cache)
        assert_same_scores(np.asarray(scores), expected[:, start:stop])
