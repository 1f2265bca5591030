"""Small programs of XLA's own that are timed to know how fast a CPU is."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podling.cost.cpu_work import Axes, Product, Turn

MOST_FLOPS = 1e9
"""Of a product that is measured; of a larger one a part is."""
MOST_ELEMENTS = 2**23
"""Of a transposing copy that is measured: beside a run's state, little memory may be left."""
IN_A_ROW = 8
"""Passes over small arrays that are timed together: within a step, threads do not fall asleep between two of them."""
ELEMENTS = 2**20
CACHED_BYTES = 2**23
"""Arrays up to here are still in the cache when a step reads what it has just written; larger ones have left it."""
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass
class Probe:
    """A small program to be timed."""

    function: Callable[..., Any]
    shapes: tuple[tuple[Axes, str], ...]  # of its arguments, which are all ones
    reuse: tuple[int, ...] = ()  # the arguments in whose place the results are put
    moved_bytes: int = 0
    parallel: bool = True
    scale: float = 1.0  # how many times over the program is what is asked
    needed: bool = True  # False for what can go by the speed of others
    compiled: Any = None
    spread: float | None = None

    def compile(self, late_s: float) -> None:
        """May run on any thread. From `late_s` on, what is not needed is left out."""
        if not self.needed and time.perf_counter() > late_s:
            return
        shapes = [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in self.shapes]
        self.compiled = jax.jit(self.function, donate_argnums=self.reuse, keep_unused=True).lower(*shapes).compile()

    def call_s(self, before: Callable[[], Any], late_s: float) -> float:
        """The median of a few calls."""
        took_s = self.calls_s(before, late_s)
        if len(took_s) > 3:
            low, middle, high = statistics.quantiles(took_s, n=4)
            self.spread = (high - low) / middle
        return statistics.median(took_s) * self.scale

    def calls_s(
        self, before: Callable[[], Any], late_s: float, least_s: float = 0.006, most_s: float = 0.08
    ) -> list[float]:
        """Calls for so long, `before` each what is not timed and empties the cache of large arrays.

        Args:
            before: called first.
            late_s: from this moment, on `time.perf_counter`, there are only two calls.
            least_s: of calling.
            most_s: of calling, unless one call takes longer.
        """
        arguments = [jnp.ones(dims, dtype) for dims, dtype in self.shapes]
        took_s: list[float] = []
        began_s = time.perf_counter()
        while (spent_s := (now_s := time.perf_counter()) - began_s) < most_s and (len(took_s) < 6 or spent_s < least_s):
            if now_s > late_s and len(took_s) > 1:
                break
            if self.moved_bytes > CACHED_BYTES:
                before()
            start_s = time.perf_counter()
            result = jax.block_until_ready(self.compiled(*arguments))
            took_s.append(time.perf_counter() - start_s)
            for place, array in zip(self.reuse, jax.tree.leaves(result), strict=False):
                arguments[place] = array
        return took_s[1:] or took_s  # the first one warms up


def product_probe(asked: Product, *, needed: bool) -> Probe:
    """A matrix product, or a part of a large one."""
    part, dims, dtype = asked.part(MOST_FLOPS), (asked.summed, asked.batch), DTYPES.get(asked.dtype, "float32")
    return Probe(
        lambda x, y: jax.lax.dot_general(x, y, dims, precision="highest"),
        ((part.left, dtype), (part.right, dtype)),
        moved_bytes=4 * (math.prod(part.left) + math.prod(part.right)),
        scale=asked.flops / part.flops,
        needed=needed,
    )


def turn_probe(asked: Turn) -> Probe:
    """A transposing copy: by one thread when the result is put into a larger array, as XLA does it."""
    part, dtype = asked.part(MOST_ELEMENTS), DTYPES.get(asked.dtype, "float32")
    result = tuple(part.dims[axis] for axis in part.order)

    def turned(x: jax.Array, scale: jax.Array, out: jax.Array) -> jax.Array:
        moved = jnp.transpose(x if part.plain else x * scale, part.order)
        return moved if part.parallel else jax.lax.dynamic_update_slice(out, moved[None], (0,) * out.ndim)

    return Probe(
        turned,
        ((part.dims, dtype), ((*part.dims[:-1], 1), dtype), (result if part.parallel else (2, *result), dtype)),
        reuse=(2,),
        moved_bytes=8 * part.size,
        parallel=part.parallel,
        scale=asked.size / part.size,
        needed=False,
    )


def stream(size: int) -> Probe:
    """From one array to another that is there already, so that no page is fresh."""
    array = ((size // 8,), "float32")
    return Probe(lambda x, out: x * 0.5 + 1.0, (array, array), reuse=(1,), moved_bytes=size)


def streams_in_a_row(size: int) -> Probe:
    """As many passes over arrays of their own."""
    array = ((size // 8,), "float32")

    def passes(*arrays: jax.Array) -> list[jax.Array]:
        return [x * 0.5 + 1.0 for x in arrays[:IN_A_ROW]]

    reuse = tuple(range(IN_A_ROW, 2 * IN_A_ROW))
    return Probe(passes, (array,) * (2 * IN_A_ROW), reuse=reuse, scale=1 / IN_A_ROW)


def single_stream(size: int) -> Probe:
    """XLA gives an update in place to one thread."""

    def update(x: jax.Array, out: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(out, x * 0.5 + 1.0, (0,))

    shapes = (((size // 8,), "float32"), ((size // 8 + 8,), "float32"))
    return Probe(update, shapes, reuse=(1,), moved_bytes=size, parallel=False)


def element(function: Callable[[jax.Array], jax.Array]) -> Probe:
    """A function of each element of an array in cache."""
    array = ((ELEMENTS,), "float32")
    return Probe(lambda x, out: function(x) * 0.5, (array, array), reuse=(1,))
