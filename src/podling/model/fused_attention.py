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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from podling.kernels import TILE, block
from podling.model.remat import ATTENDED

LOG2_E = math.log2(math.e)
HIDDEN = -1e30  # a score above the diagonal
FORWARD_BLOCK = 128
"""Queries at a time of the forward pass; the backward pass takes as many keys as the matrix unit has columns."""
AHEAD = 3
"""Blocks whose scores are asked for before they are needed."""

Tile = Float[Array, "B T N"]


def fused_attention(q: Tile, k: Tile, v: Tile, heads: int, *, mxu_size: int = 128, interpret: bool = False) -> Tile:
    """`attention` under the causal mask, on one device: no layout, or inside `shard_map`.

    Args:
        q: queries; sizes that `kernels.attention_problem` lets pass.
        k: keys.
        v: values.
        heads: H, of head_dim N / H.
        mxu_size: columns of the chip's matrix unit.
        interpret: run the kernel's operations one by one, for a device that is no TPU.
    """
    out: Any = _with_own_gradient(q, k, v, heads, mxu_size, interpret)
    return out


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _with_own_gradient(q: Tile, k: Tile, v: Tile, heads: int, mxu_size: int, interpret: bool) -> Tile:
    return _forward(q, k, v, heads, interpret)[0]


def _saved(q: Tile, k: Tile, v: Tile, heads: int, _: int, interpret: bool) -> tuple[Tile, tuple[Array, ...]]:
    out, log_sum = (checkpoint_name(x, ATTENDED) for x in _forward(q, k, v, heads, interpret))
    return out, (q, k, v, out, log_sum)


def _pulled(
    heads: int, mxu_size: int, interpret: bool, saved: tuple[Array, ...], d_out: Tile
) -> tuple[Tile, Tile, Tile]:
    return _backward(saved, d_out, heads, mxu_size, interpret)


_with_own_gradient.defvjp(_saved, _pulled)


def _forward(q: Tile, k: Tile, v: Tile, heads: int, interpret: bool) -> tuple[Tile, Array]:
    """Outputs, and log2 of each softmax's denominator [B, tiles, heads of a tile, T]."""
    shape = _Shape(q, heads)
    log_sum = jax.ShapeDtypeStruct((shape.batch, shape.tiles, shape.group, shape.length), jnp.float32)
    return pl.pallas_call(
        partial(_forward_kernel, shape=shape, block=block(shape.length, FORWARD_BLOCK)),
        grid=(shape.batch, shape.tiles),
        in_specs=[shape.tile] * 3,
        out_specs=[shape.tile, shape.column],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), log_sum],
        cost_estimate=shape.cost(products=2, arrays=4),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="fused_attention_forward",
    )(q, k, v)


def _backward(
    saved: tuple[Array, ...], d_out: Tile, heads: int, mxu_size: int, interpret: bool
) -> tuple[Tile, Tile, Tile]:
    q = saved[0]
    shape = _Shape(q, heads)
    return pl.pallas_call(
        partial(_backward_kernel, shape=shape, block=block(shape.length, mxu_size)),
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
        self.width = min(self.features, max(TILE, self.size))
        self.group = self.width // self.size  # heads that share a tile
        self.tiles = -(-self.features // self.width)
        self.ragged = self.features % self.width != 0  # the last tile holds fewer heads
        self.scale = self.size**-0.5
        self.tile = pl.BlockSpec((None, self.length, self.width), lambda b, tile: (b, 0, tile))
        self.column = pl.BlockSpec((None, None, self.group, self.length), lambda b, tile: (b, tile, 0, 0))

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


Refs = Any
"""What a kernel reads and writes: references to blocks in VMEM."""


def _forward_kernel(
    q_ref: Refs, k_ref: Refs, v_ref: Refs, out_ref: Refs, log_sum_ref: Refs, *, shape: _Shape, block: int
):
    """One block of queries after another, the last first; see `_ahead` for the order."""
    v_t = shape.real(v_ref[...]).T
    to_log2 = shape.scale * LOG2_E

    def scores_of(start: int, head: int) -> list[tuple[slice, Array]]:
        here, before = slice(start, start + block), slice(0, start)
        q = shape.only(q_ref[here], head)
        pieces = [(here, _masked(shape.dot(shape.real(k_ref[here]), q, transposed=True), HIDDEN))]
        if start:
            pieces.append((before, shape.dot(shape.real(k_ref[before]), q, transposed=True)))
        return pieces  # each [keys, queries]

    outs: list[Array] = []
    for start, head, pieces in _ahead(reversed(range(0, shape.length, block)), shape.group, scores_of):
        here, v_head = slice(start, start + block), v_t[shape.rows(head)]
        top = to_log2 * jnp.max(jnp.stack([jnp.max(s, axis=0) for _, s in pieces]), axis=0, keepdims=True)
        total, out = jnp.zeros_like(top), jnp.zeros((shape.size, block), jnp.float32)
        for keys, scores in pieces:
            weights = jnp.exp2(scores * to_log2 - top)
            total += jnp.sum(weights, axis=0, keepdims=True)
            out += shape.dot(v_head[:, keys], weights.astype(shape.dtype))
        outs.append((out / total).astype(shape.dtype))
        log_sum_ref[head : head + 1, here] = top + jnp.log2(total)
        if head + 1 == shape.group:
            out_ref[here] = jnp.concatenate(outs).T
            outs = []


def _backward_kernel(
    q_ref: Refs, k_ref: Refs, v_ref: Refs, out_ref: Refs, log_sum_ref: Refs, d_out_ref: Refs,
    dq_ref: Refs, dk_ref: Refs, dv_ref: Refs, dq_sum_ref: Refs, *, shape: _Shape, block: int,
):  # fmt: skip
    """One block of keys after another; the queries' gradients are summed in float32 on the way."""
    to_log2 = shape.scale * LOG2_E
    # The softmax's gradient needs each query's sum of weights times their gradients: that of output times gradient.
    inner = (out_ref[...].astype(jnp.float32) * d_out_ref[...].astype(jnp.float32)).T
    mean = [jnp.sum(inner[shape.rows(head)], axis=0, keepdims=True) for head in range(shape.group)]
    q_t, k_t, d_out_t = q_ref[...].T, shape.real(k_ref[...]).T, d_out_ref[...].T

    def scores_of(start: int, head: int) -> tuple[Array, Array]:
        keys, after = slice(start, start + block), slice(start, shape.length)  # of the keys, and who may see them
        scores = shape.dot(shape.real(k_ref[keys]), shape.only(q_ref[after], head), transposed=True)
        return scores, shape.dot(shape.real(v_ref[keys]), shape.only(d_out_ref[after], head), transposed=True)

    dks: list[Array] = []
    dvs: list[Array] = []
    for start, head, (scores, d_weights) in _ahead(range(0, shape.length, block), shape.group, scores_of):
        keys, after, rows = slice(start, start + block), slice(start, shape.length), shape.rows(head)
        weights = _visible(jnp.exp2(scores * to_log2 - log_sum_ref[head : head + 1, after]), block)
        d_scores = (weights * (d_weights - mean[head][:, after])).astype(shape.dtype)
        dvs.append(shape.dot(d_out_t[rows, after], weights.astype(shape.dtype), transposed=True))  # [head_dim, keys]
        dks.append(shape.dot(q_t[rows, after], d_scores, transposed=True) * shape.scale)
        dq = shape.dot(k_t[rows, keys], d_scores)  # [head_dim, queries]
        dq_sum_ref[rows, after] = dq + dq_sum_ref[rows, after] if start else dq
        if head + 1 == shape.group:
            dk_ref[keys] = jnp.concatenate(dks).astype(shape.dtype).T
            dv_ref[keys] = jnp.concatenate(dvs).astype(shape.dtype).T
            dq_ref[keys] = (dq_sum_ref[:, keys] * shape.scale).astype(shape.dtype).T  # no later key adds to these
            dks, dvs = [], []


def _ahead(starts: Iterable[int], heads: int, scores_of: Callable[[int, int], Any]) -> Iterator[tuple[int, int, Any]]:
    """Every block of every head with its scores, those of the next ones asked for before it is worked on.

    The compiler keeps to the order in which operations are written: so the matrix unit has products to make while the
    vector unit computes exponentials.
    """
    units = [(start, head) for start in starts for head in range(heads)]
    asked = deque(scores_of(*unit) for unit in units[:AHEAD])
    for index, (start, head) in enumerate(units):
        if index + AHEAD < len(units):
            asked.append(scores_of(*units[index + AHEAD]))
        yield start, head, asked.popleft()
