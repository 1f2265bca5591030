"""Sampling against an independent NumPy account of the same rules, and the invariants that hold for any settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podling.generate import sampling
from podling.generate.sampling import NEVER, Sampling, allowed, row_keys
from podling.generate.settings import Settings

VOCAB = 12
filter_logits = jax.jit(sampling.filter_logits)
sample = jax.jit(sampling.sample)


def numpy_kept(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that stay, token by token, in float64: written from the definitions, not from the JAX code."""
    p = np.exp((row - row.max()).astype(np.float64) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order if top_k == 0 else [i for i in order if p[i] >= p[order[min(top_k, len(p)) - 1]]]
    if top_p < 1:
        mass, nucleus = sum(p[i] for i in kept), []
        for i in kept:
            if sum(p[j] for j in nucleus) / mass >= top_p:
                break
            nucleus.append(i)
        kept = [i for i in kept if p[i] >= p[nucleus[-1]]]
    return {i for i in kept if p[i] >= min_p * p.max()}


rows = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(lambda xs: np.array(xs, np.float32) / 4)
choices = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.7, 1.0, 2.0]),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
        "min_p": st.sampled_from([0.0, 0.013, 0.17, 0.83]),
    }
)


@settings(max_examples=150, deadline=None)
@given(rows, choices)
def test_filters_agree_with_numpy(row, chosen):
    got = np.asarray(filter_logits(jnp.asarray(row)[None], Sampling.of(Settings(**chosen), 1)))[0]
    kept = {i for i in range(VOCAB) if got[i] > NEVER / 2}
    want = numpy_kept(row, **chosen)
    if kept != want:  # a cumulated probability within rounding of top_p may fall on either side of it
        close = [numpy_kept(row, **{**chosen, "top_p": chosen["top_p"] + d}) for d in (-1e-5, 1e-5)]
        assert chosen["top_p"] < 1 and kept in close
    # what stays keeps its odds: tempered logits up to one constant
    ids = sorted(kept)
    expected = row[ids] / chosen["temperature"]
    np.testing.assert_allclose(got[ids] - got[ids].max(), expected - expected.max(), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=2, max_size=2), choices, choices)
def test_rows_with_different_settings_do_not_touch_each_other(two, a, b):
    both = Sampling(*(jnp.concatenate(x) for x in zip(*(Sampling.of(Settings(**c), 1) for c in (a, b)), strict=True)))
    together = np.asarray(filter_logits(jnp.asarray(np.stack(two)), both))
    for row, chosen, got in zip(two, (a, b), together, strict=True):
        alone = np.asarray(filter_logits(jnp.asarray(row)[None], Sampling.of(Settings(**chosen), 1)))[0]
        np.testing.assert_array_equal(alone, got)


@settings(max_examples=60, deadline=None)
@given(rows, choices, st.integers(0, 2**32 - 1))
def test_the_best_token_stays_and_the_forbidden_never_come(row, chosen, seed):
    mask = allowed(VOCAB, VOCAB - 3, never=(1,))
    row = row.copy()
    row[[1, VOCAB - 1]] = 50.0  # the most likely ones are exactly those that must not be drawn
    n = 64
    keys = row_keys(jnp.full((n,), seed, jnp.uint32), jnp.arange(n))
    drawn = np.asarray(sample(jnp.tile(row, (n, 1)), Sampling.of(Settings(**chosen), n), mask, keys=keys))
    legal = [i for i in range(VOCAB - 3) if i != 1]
    assert set(drawn.tolist()) <= set(legal)
    greedy = sample(jnp.asarray(row)[None], Sampling.of(Settings(temperature=0.0), 1), mask, keys=keys[:1])
    assert row[int(greedy[0])] == row[legal].max()


def test_draws_follow_the_probabilities():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    n = 20_000
    keys = row_keys(jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.int32))
    drawn = sample(jnp.tile(row, (n, 1)), Sampling.of(Settings(top_k=3), n), allowed(4, 4), keys=keys)
    share = np.bincount(np.asarray(drawn), minlength=4) / n
    want = np.array([0.5, 0.3, 0.15, 0.0]) / 0.95
    # five standard deviations of a share: a true sampler fails once in a million
    assert np.all(np.abs(share - want) <= 5 * np.sqrt(want * (1 - want) / n))


def test_a_tiny_temperature_is_greedy_and_finite():
    row = jnp.asarray([[3e4, 2.9e4, -3e4, 0.0]])
    out = np.asarray(filter_logits(row, Sampling.of(Settings(temperature=1e-35, top_p=0.9), 1)))
    assert np.isfinite(out).all() and (out[0] > NEVER / 2).tolist() == [True, False, False, False]


def test_keys_differ_by_seed_and_by_token():
    data = jax.random.key_data(row_keys(jnp.asarray([0, 0, 1], jnp.uint32), jnp.asarray([0, 1, 0])))
    assert len({tuple(x) for x in np.asarray(data).tolist()}) == 3


@pytest.mark.parametrize(
    "wrong, flag",
    [
        ({"max_tokens": 0}, "--max-tokens"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.5}, "--top-p"),
        ({"min_p": 2.0}, "--min-p"),
        ({"stop": ("",)}, "--stop"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_settings_out_of_range_are_named(wrong, flag):
    assert [p.where for p in Settings(**wrong).problems()] == [flag]
    assert Settings().problems() == []
