"""Causal attention as one TPU kernel each way, for sequences whose scores fit on the chip.

Queries, keys and values are read as the projections leave them, [B, T, heads x head_dim]: a program takes one sequence
and the heads that share a tile of 128 lanes (two of 64), so nothing is transposed or padded in memory. A head is picked
by zeroing the other lanes of one factor, which costs a matrix unit of 128 nothing. Scores are held transposed,
[keys, queries], so that maxima and sums run down registers and not across lanes, and head_dim is what streams through
the matrix unit in three of the backward pass's five products. Blocks above the diagonal are not computed.

The softmax is taken over whole columns of scores, in float32 (no running maximum as in Dao et al. 2022,
arXiv:2205.14135); the backward pass computes it again from its logarithm, as there. docs/attention.md has the cycles
that the compiler schedules for these kernels, for JAX's own and for other block sizes.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from podling.model.remat import ATTENDED

LANES = 128
LOG2_E = math.log2(math.e)
HIDDEN = -1e30  # a score above the diagonal
FORWARD_BLOCK, BACKWARD_BLOCK = 512, 256
"""Queries (forward) and keys (backward) at a time, at most."""

Tile = Float[Array, "B T N"]


def fused_attention(q: Tile, k: Tile, v: Tile, heads: int, *, interpret: bool = False) -> Tile:
    """`attention` under the causal mask, on one device: no layout, or inside `shard_map`.

    Args:
        q: queries; T a multiple of 128.
        k: keys.
        v: values.
        heads: H; head_dim, N / H, divides 128 or is a multiple of it.
        interpret: run the kernel's operations one by one, for a device that is no TPU.
    """
    out: Any = _with_own_gradient(q, k, v, heads, interpret)
    return out


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _with_own_gradient(q: Tile, k: Tile, v: Tile, heads: int, interpret: bool) -> Tile:
    return _forward(q, k, v, heads, interpret)[0]


def _saved(q: Tile, k: Tile, v: Tile, heads: int, interpret: bool) -> tuple[Tile, tuple[Array, ...]]:
    out, log_sum = (checkpoint_name(x, ATTENDED) for x in _forward(q, k, v, heads, interpret))
    return out, (q, k, v, out, log_sum)


def _pulled(heads: int, interpret: bool, saved: tuple[Array, ...], d_out: Tile) -> tuple[Tile, Tile, Tile]:
    return _backward(saved, d_out, heads, interpret)


_with_own_gradient.defvjp(_saved, _pulled)


def _forward(q: Tile, k: Tile, v: Tile, heads: int, interpret: bool) -> tuple[Tile, Array]:
    """Outputs, and log2 of each softmax's denominator [B, tiles, heads of a tile, T]."""
    shape = _Shape(q, heads)
    log_sum = jax.ShapeDtypeStruct((shape.batch, shape.tiles, shape.group, shape.length), jnp.float32)
    return pl.pallas_call(
        partial(_forward_kernel, shape=shape, block=shape.block(FORWARD_BLOCK)),
        grid=(shape.batch, shape.tiles),
        in_specs=[shape.tile] * 3,
        out_specs=[shape.tile, shape.column],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), log_sum],
        cost_estimate=shape.cost(products=2, arrays=4),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="fused_attention_forward",
    )(q, k, v)


def _backward(saved: tuple[Array, ...], d_out: Tile, heads: int, interpret: bool) -> tuple[Tile, Tile, Tile]:
    q = saved[0]
    shape = _Shape(q, heads)
    return pl.pallas_call(
        partial(_backward_kernel, shape=shape, block=shape.block(BACKWARD_BLOCK)),
        grid=(shape.batch, shape.tiles),
        in_specs=[shape.tile] * 4 + [shape.column, shape.tile],
        out_specs=[shape.tile] * 3,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)] * 3,
        scratch_shapes=[pltpu.VMEM((shape.width, shape.length), jnp.float32)],
        cost_estimate=shape.cost(products=5, arrays=8),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="fused_attention_backward",
    )(*saved, d_out)


class _Shape:
    """How one device's arrays are cut into programs."""

    def __init__(self, q: Tile, heads: int):
        self.batch, self.length, self.features = q.shape
        self.heads, self.size, self.dtype = heads, self.features // heads, q.dtype
        self.width = min(self.features, max(LANES, self.size))
        self.group = self.width // self.size  # heads that share a tile
        self.tiles = -(-self.features // self.width)
        self.ragged = self.features % self.width != 0  # the last tile holds fewer heads
        self.scale = self.size**-0.5
        self.tile = pl.BlockSpec((None, self.length, self.width), lambda b, tile: (b, 0, tile))
        self.column = pl.BlockSpec((None, None, self.group, self.length), lambda b, tile: (b, tile, 0, 0))

    def block(self, largest: int) -> int:
        """The largest whole number of tiles, up to `largest`, that divides the sequence."""
        return next(size for size in range(min(largest, self.length), 0, -LANES) if self.length % size == 0)

    def rows(self, head: int) -> slice:
        """A head's features where they lie along the first axis."""
        return slice(head * self.size, (head + 1) * self.size)

    def only(self, x: Array, head: int) -> Array:
        """[T, width] with the lanes of other heads zeroed."""
        if self.group == 1:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where((lane >= head * self.size) & (lane < (head + 1) * self.size), x, jnp.zeros_like(x))

    def real(self, x: Array) -> Array:
        """[T, width] with what lies beyond the last head zeroed: what is read there may be NaN."""
        if not self.ragged:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + pl.program_id(1) * self.width
        return jnp.where(lane < self.features, x, jnp.zeros_like(x))

    def dot(self, x: Array, y: Array, *, transposed: bool = False) -> Array:
        """The product x y, or x y^T, summed in float32."""
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        axes = (((1,), (1 if transposed else 0,)), ((), ()))
        return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)

    def cost(self, products: int, arrays: int) -> pl.CostEstimate:
        """What is computed below and on the diagonal, and the arrays of q's size that are read or written."""
        scores = self.batch * self.heads * self.length * (self.length + 1) // 2
        moved = arrays * self.batch * self.length * self.features * self.dtype.itemsize
        return pl.CostEstimate(
            flops=2 * products * scores * self.size,
            transcendentals=scores,
            bytes_accessed=moved + 4 * self.batch * self.heads * self.length,
        )


def _masked(block: Array, hidden: float) -> Array:
    """A block on the diagonal, [keys, queries], with `hidden` where the query comes before the key."""
    key, query = (jax.lax.broadcasted_iota(jnp.int32, block.shape, axis) for axis in (0, 1))
    return jnp.where(key > query, hidden, block)


def _visible(weights: Array, block: int) -> Array:
    """Weights of `block` keys [block, queries from the same place on], none above the diagonal."""
    first = _masked(weights[:, :block], 0.0)
    return first if weights.shape[1] == block else jnp.concatenate([first, weights[:, block:]], axis=1)


def _forward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, log_sum_ref: Any, *, shape: _Shape, block: int):
    k, v_t = shape.real(k_ref[...]), shape.real(v_ref[...]).T
    to_log2 = shape.scale * LOG2_E
    for start in range(0, shape.length, block):
        here, before = slice(start, start + block), slice(0, start)
        outs = []
        for head in range(shape.group):
            q = shape.only(q_ref[here], head)
            v_head = v_t[shape.rows(head)]
            scores = shape.dot(k[here], q, transposed=True)  # [keys, queries]
            pieces = [(here, _masked(scores, HIDDEN))]
            if start:
                pieces.append((before, shape.dot(k[before], q, transposed=True)))
            top = to_log2 * jnp.max(jnp.stack([jnp.max(s, axis=0) for _, s in pieces]), axis=0, keepdims=True)
            total, out = 0.0, 0.0
            for keys, s in pieces:
                weights = jnp.exp2(s * to_log2 - top)
                total += jnp.sum(weights, axis=0, keepdims=True)
                out += shape.dot(v_head[:, keys], weights.astype(shape.dtype))  # [head_dim, queries]
            outs.append(out / total)
            log_sum_ref[head : head + 1, here] = top + jnp.log2(total)
        out_ref[here] = jnp.concatenate(outs).T.astype(shape.dtype)


def _backward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, log_sum_ref: Any, d_out_ref: Any,
    dq_ref: Any, dk_ref: Any, dv_ref: Any, dq_sum_ref: Any, *, shape: _Shape, block: int,
):  # fmt: skip
    q, k, v, d_out = q_ref[...], shape.real(k_ref[...]), shape.real(v_ref[...]), d_out_ref[...]
    q_t, k_t, d_out_t = q.T, k.T, d_out.T
    # The softmax's gradient needs each query's sum of weights times their gradients: that of output times gradient.
    inner = (out_ref[...].astype(jnp.float32) * d_out.astype(jnp.float32)).T
    to_log2 = shape.scale * LOG2_E
    for start in range(0, shape.length, block):
        keys, after = slice(start, start + block), slice(start, shape.length)  # of the keys, and who may see them
        dks, dvs = [], []
        for head in range(shape.group):
            rows = shape.rows(head)
            scores = shape.dot(k[keys], shape.only(q[after], head), transposed=True)  # [keys, queries]
            weights = jnp.exp2(scores * to_log2 - log_sum_ref[head : head + 1, after])
            weights = _visible(weights, block)
            d_weights = shape.dot(v[keys], shape.only(d_out[after], head), transposed=True)
            mean = jnp.sum(inner[rows, after], axis=0, keepdims=True)
            d_scores = (weights * (d_weights - mean)).astype(shape.dtype)
            dvs.append(
                shape.dot(d_out_t[rows, after], weights.astype(shape.dtype), transposed=True)
            )  # [head_dim, keys]
            dks.append(shape.dot(q_t[rows, after], d_scores, transposed=True))
            dq = shape.dot(k_t[rows, keys], d_scores)  # [head_dim, queries]
            if start:
                dq_sum_ref[rows, after] += dq
            else:
                dq_sum_ref[rows, after] = dq
        dk_ref[keys] = (jnp.concatenate(dks) * shape.scale).T.astype(shape.dtype)
        dv_ref[keys] = jnp.concatenate(dvs).T.astype(shape.dtype)
    dq_ref[...] = (dq_sum_ref[...] * shape.scale).T.astype(shape.dtype)
