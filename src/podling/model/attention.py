"""Scaled dot-product attention (Vaswani et al. 2017, equation 1), scores and softmax in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from podling.model.ops import dropout, einsum

MASKED = -1e30  # finite, so that a fully masked row gives a uniform softmax and not NaN


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """True where position t may look at position s: s <= t."""
    positions = jnp.arange(length)
    return positions[:, None] >= positions[None, :]


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    mask: Bool[Array, "*#B T S"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "B T H K"]:
    """Each query's weighted mean of the values it may see.

    Args:
        q: queries, in the compute dtype.
        k: keys.
        v: values.
        mask: True where the query may see the key; [T, S], or [B, T, S] when rows differ.
        dropout_rate: probability of dropping a weight.
        dropout_key: no key, no dropout.
    """
    scores = einsum("bthk,bshk->bhts", q, k, out_dtype=jnp.float32) * (q.shape[-1] ** -0.5)
    mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(q.dtype)
    weights = dropout(weights, dropout_rate, dropout_key)
    return einsum("bhts,bshk->bthk", weights, v)
