"""The few operations everything else is made of."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from podling.model.remat import STATISTICS
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


def add_bias(x: Float[Array, "*B D"], bias: Float[Array, " D"]) -> Float[Array, "*B D"]:
    """Add a float32 vector to every position, in float32, so that its gradient is a sum in float32 too."""
    wide = x.astype(jnp.float32)
    return (wide + spread(bias, wide)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float = LN_EPS
) -> Float[Array, "*B D"]:
    """LayerNorm (Ba et al. 2016) with float32 statistics, returned in x's dtype.

    For the backward pass it keeps x and two numbers a row; what automatic differentiation would keep is three times as
    large, or takes the statistics once more.
    """
    return _layer_norm(x, scale, bias, eps)


@jax.custom_vjp
def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    return _layer_norm_forward(x, scale, bias, eps)[0]


def _layer_norm_forward(x: Array, scale: Array, bias: Array, eps: float) -> tuple[Array, Any]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1)
    if x.dtype == jnp.float32:
        variance = jnp.mean(jnp.square(wide - mean[..., None]), axis=-1)
    else:  # in the same pass over x: what the difference loses in float32 is far below x's own last place
        variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1) - jnp.square(mean), 0.0)
    mean, inverse = (checkpoint_name(row, STATISTICS) for row in (mean, jax.lax.rsqrt(variance + eps)))
    normed = (wide - mean[..., None]) * inverse[..., None]
    out = (normed * spread(scale, normed) + spread(bias, normed)).astype(x.dtype)
    return out, (x, mean, inverse, scale, bias)


def _layer_norm_backward(kept: Any, grad: Array) -> tuple[Array, Array, Array, None]:
    x, mean, inverse, scale, bias = kept
    normed = (x.astype(jnp.float32) - mean[..., None]) * inverse[..., None]
    grad = grad.astype(jnp.float32)
    wide, of_scale = jax.vjp(lambda scale: spread(scale, normed), scale)
    _, of_bias = jax.vjp(lambda bias: spread(bias, normed), bias)
    slope = grad * wide
    along = jnp.mean(slope * normed, axis=-1, keepdims=True)
    of_x = inverse[..., None] * (slope - jnp.mean(slope, axis=-1, keepdims=True) - normed * along)
    return of_x.astype(x.dtype), of_scale(grad * normed)[0], of_bias(grad)[0], None


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Zero each element with probability `rate` and scale the rest by 1/(1-rate); no key, no dropout."""
    if key is None or rate == 0.0:
        return x
    sharding = jax.typeof(x).sharding
    out_sharding = None if sharding.mesh.empty else sharding.spec
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape, out_sharding=out_sharding)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
