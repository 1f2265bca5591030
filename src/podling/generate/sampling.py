"""From logits to a token: temperature, top-k, top-p and min-p as pure functions of a row.

Every setting is an array with one value a row, so rows with different settings share a batch and a new temperature
does not compile anything anew. The filters apply in the order temperature, top-k, top-p, min-p, each to what the one
before left. Glossary: B rows, V vocabulary (padded).
"""

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
    # Only top-k and top-p need the sort, the one expensive thing here (5 ms a row of 50k tokens on a laptop core).
    wanted = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    logits = jax.lax.cond(wanted, _top_k_top_p, lambda logits, _: logits, logits, sampling)
    # p / p_best >= min_p, in logs: normalisation cancels, so filtering before or after top-p is the same. Best is 0.
    floor = jnp.where(sampling.min_p > 0, jnp.log(jnp.maximum(sampling.min_p, 1e-38)), -jnp.inf)[:, None]
    return jnp.where(logits >= floor, logits, NEVER)


def _top_k_top_p(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    vocab = logits.shape[-1]
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ranked, (k - 1)[:, None], axis=-1)
    ranked = jnp.where(ranked >= kth, ranked, NEVER)
    probs = jax.nn.softmax(ranked, axis=-1)
    # A token stays when the ones before it have not yet reached top_p; the first always does.
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = (before < sampling.top_p[:, None]) | (sampling.top_p >= 1)[:, None]
    pth = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.maximum(kth, pth), logits, NEVER)


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
    greedy = jnp.argmax(logits, axis=-1)
    drawn = jax.vmap(jax.random.categorical)(keys, filter_logits(logits, sampling))
    return jnp.where(sampling.temperature > 0, drawn, greedy).astype(jnp.int32)


def row_keys(seeds: Int[Array, " B"], index: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key that draws token number `index` of the row with this seed: nothing else decides it."""
    return jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(seeds, index)
