"""From logits to a token: temperature, top-k, top-p and min-p as pure functions of a row.

Every setting is an array with one value a row, so rows with different settings share a batch and a new temperature
does not compile anything anew. The filters apply in the order temperature, top-k, top-p, min-p, each to what the one
before left. Glossary: B rows, V vocabulary (padded).
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from podling.generate.settings import Settings

NEVER = -1e30
"""Logit of a token that must not be drawn; finite, so that no row can turn into NaN."""


class Sampling(NamedTuple):
    """`Settings`, one value a row: see there for what they mean."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]

    @classmethod
    def of(cls, settings: Settings, rows: int) -> Self:
        """The same settings for `rows` rows."""
        return cls(
            jnp.full((rows,), settings.temperature, jnp.float32),
            jnp.full((rows,), min(settings.top_k, 2**31 - 1), jnp.int32),
            jnp.full((rows,), settings.top_p, jnp.float32),
            jnp.full((rows,), settings.min_p, jnp.float32),
        )


def allowed(padded_vocab: int, vocab_size: int, never: tuple[int, ...] = ()) -> Bool[Array, " V"]:
    """Which ids may be drawn: those the tokenizer has, without the ones in `never`."""
    mask = jnp.arange(padded_vocab) < vocab_size
    return mask.at[jnp.asarray(never, jnp.int32)].set(False) if never else mask


def filter_logits(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Tempered logits with every token the settings rule out at `NEVER`.

    Tokens that tie with the last one kept are kept too, so equal tokens are never told apart by their id. The most
    likely token always stays. Nucleus (top-p) sampling: Holtzman et al. 2020; min-p: Nguyen et al. 2024.
    """
    hot = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    # Relative to the best first: a tiny temperature then underflows to NEVER instead of overflowing to infinity.
    logits = logits.astype(jnp.float32)
    logits = jnp.maximum((logits - jnp.max(logits, axis=-1, keepdims=True)) / hot, NEVER)
    # Only top-k and top-p need to know how tokens rank, the one expensive thing here.
    wanted = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    logits = jax.lax.cond(wanted, _top_k_top_p, lambda logits, _: logits, logits, sampling)
    # p / p_best >= min_p, in logs: normalisation cancels, so filtering before or after top-p is the same. Best is 0.
    floor = jnp.where(sampling.min_p > 0, jnp.log(jnp.maximum(sampling.min_p, 1e-38)), -jnp.inf)[:, None]
    return jnp.where(logits >= floor, logits, NEVER)


def _top_k_top_p(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Both filters without a sort, which would take half as long as the model (9 ms a row of 50k tokens on a core).

    Logits are at most 0 here, so the bits of their distance from 0, read as integers, are in the order of likelihood,
    and the last rank that is kept is found bit by bit: 31 passes over the row.
    """
    rank = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.int32)  # 0: the best; -0.0 too
    k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    kth = _last(lambda r: jnp.sum(rank < r[:, None], axis=-1) < k, len(logits))
    probs = jax.nn.softmax(jnp.where(rank <= kth[:, None], logits, NEVER), axis=-1)
    # A token stays when the ones before it have not yet reached top_p; the first always does.
    pth = _last(lambda r: jnp.sum(jnp.where(rank < r[:, None], probs, 0), axis=-1) < sampling.top_p, len(logits))
    last = jnp.where(sampling.top_p < 1, jnp.minimum(kth, pth), kth)
    return jnp.where(rank <= last[:, None], logits, NEVER)


def _last(kept: Callable[[Int[Array, " B"]], Bool[Array, " B"]], rows: int) -> Int[Array, " B"]:
    """By row the largest integer of 31 bits that is `kept`; 0 is, and none is beyond the first that is not."""

    def bit(index: Int[Array, ""], found: Int[Array, " B"]) -> Int[Array, " B"]:
        tried = found | (1 << (30 - index))
        return jnp.where(kept(tried), tried, found)

    return jax.lax.fori_loop(0, 31, bit, jnp.zeros(rows, jnp.int32))


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, mask: Bool[Array, " V"], *, keys: Key[Array, " B"]
) -> Int[Array, " B"]:
    """Draw one token a row.

    Args:
        logits: any finite values; columns outside `mask` are ignored.
        sampling: settings, one a row.
        mask: ids that may be drawn, from `allowed`.
        keys: one key a row, so a row's draw depends on its own key and logits only.
    """
    logits = jnp.where(mask[None], logits, NEVER)
    greedy = _best(logits)

    def draw() -> Int[Array, " B"]:
        # The Gumbel trick: the largest of logits plus such noise is a draw from their softmax.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
        return jnp.where(sampling.temperature > 0, _best(filter_logits(logits, sampling) + noise), greedy)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: greedy)


def _best(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The first of the largest, as `argmax`, which a CPU takes many times as long for as for these two reductions."""
    size = scores.shape[-1]
    best = jnp.max(scores, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(scores == best, jnp.arange(size)[None], size), axis=-1)
    return jnp.where(first < size, first, 0).astype(jnp.int32)  # NaN equals nothing


def row_keys(seeds: Int[Array, " B"], index: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key that draws token number `index` of the row with this seed: nothing else decides it."""
    return jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(seeds, index)
