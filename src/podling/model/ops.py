"""The few operations everything else is made of."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from podling.parallel.collectives import spread

LN_EPS = 1e-5


def einsum(
    subscripts: str,
    x: Array,
    y: Array,
    *,
    out_spec: PartitionSpec | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    """Contract in the operands' dtype; float32 means float32 also on a TPU, whose default would be bfloat16 passes.

    Args:
        subscripts: as in `jnp.einsum`.
        x: left operand; its dtype decides the precision.
        y: right operand.
        out_spec: layout of the result, where a contraction over a sharded axis leaves it open.
        out_dtype: accumulate into this dtype instead of rounding back to the operands' own.
    """
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=out_dtype, out_sharding=out_spec)


def layer_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float = LN_EPS
) -> Float[Array, "*B D"]:
    """LayerNorm (Ba et al. 2016) with float32 statistics, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + eps)
    return (normed * spread(scale, normed) + spread(bias, normed)).astype(x.dtype)


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Zero each element with probability `rate` and scale the rest by 1/(1-rate); no key, no dropout."""
    if key is None or rate == 0.0:
        return x
    sharding = jax.typeof(x).sharding
    out_sharding = None if sharding.mesh.empty else sharding.spec
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape, out_sharding=out_sharding)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
