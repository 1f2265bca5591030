"""How fast this CPU is at what a compiled step is made of, measured by small programs of XLA's own. No step is timed.

Measured are matrix products and transposing copies of the sizes that a program states (a CPU's speed at either
differs tenfold with their shape), passes over arrays in cache and in memory by one thread and by all, the first touch
of fresh pages, and exp and tanh.
"""

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from podling.cost.cpu_work import Axes, Product, Turn, products, turns
from podling.hlo.program import Program

MOST_FLOPS = 1e9
"""Of a product that is measured; of a larger one a part is."""
MOST_ELEMENTS = 2**23
"""Of a transposing copy that is measured: beside a run's state, little memory may be left."""
LEAST_SHARE = 0.02
"""A product or a transposition that is less of a step goes by the speed of the others."""
STREAM_BYTES = tuple(2**power for power in (20, 22, 24, 26))  # read and written by a measured pass
IN_A_ROW = 8
"""Passes over small arrays that are timed together: within a step, threads do not fall asleep between two of them."""
FRESH_BYTES = 2**26
ELEMENTS = 2**20
CACHED_BYTES = 2**23
"""Arrays up to here are still in the cache when a step reads what it has just written; larger ones have left it."""
CALL_S = 2e-6
"""Handing an instruction to XLA's threads; too short to be measured from outside, and of no weight."""
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

Work = TypeVar("Work", Product, Turn)


@dataclass(frozen=True)
class CpuPeaks:
    """What was measured, all in seconds."""

    product_s: Mapping[Product, float]
    turn_s: Mapping[Turn, float]
    stream_s: Mapping[int, float]  # a pass of all threads that reads and writes so many bytes
    single_stream_s: Mapping[int, float]  # of one thread
    fresh_s_per_byte: float  # of memory that the system has just handed out, beyond the pass itself
    exp_s: float  # of one element, all threads together
    tanh_s: float
    call_s: float  # of an instruction that does next to nothing
    threads: int
    took_s: float = field(default=0.0, compare=False)

    def multiply_s(self, asked: Product) -> float:
        """Seconds of a product, at its own speed or that of all that were measured."""
        return self.product_s.get(asked, asked.flops * self._flop_s)

    def turned_s(self, asked: Turn) -> float:
        """Seconds of one element of a transposing copy."""
        return self.turn_s[asked] / asked.size if asked in self.turn_s else self._turned_element_s

    def pass_s(self, moved_bytes: float, *, parallel: bool) -> float:
        """Seconds of a pass that reads and writes so many bytes, at the speed of the nearest size."""
        known = self.stream_s if parallel else self.single_stream_s
        size = min(known, key=lambda size: abs(math.log(max(moved_bytes, 1) / size)))
        return known[size] * moved_bytes / size

    @cached_property
    def _flop_s(self) -> float:
        return sum(self.product_s.values()) / max(1, sum(found.flops for found in self.product_s))

    @cached_property
    def _turned_element_s(self) -> float:
        return statistics.median([took_s / found.size for found, took_s in self.turn_s.items()] or [0.0])


@dataclass
class Probe:
    """A small program to be timed."""

    function: Callable[..., Any]
    shapes: tuple[tuple[Axes, str], ...]  # of its arguments, which are all ones
    reuse: tuple[int, ...] = ()  # the arguments in whose place the results are put
    moved_bytes: int = 0
    parallel: bool = True
    scale: float = 1.0  # how many times over the program is what is asked
    compiled: Any = None

    def compile(self) -> None:
        """May run on any thread."""
        shapes = [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in self.shapes]
        self.compiled = jax.jit(self.function, donate_argnums=self.reuse, keep_unused=True).lower(*shapes).compile()

    def call_s(self, before: Callable[[], Any]) -> float:
        """The median of a few calls."""
        return statistics.median(self.calls_s(before)) * self.scale

    def calls_s(self, before: Callable[[], Any], least_s: float = 0.006, most_s: float = 0.08) -> list[float]:
        """Calls for so long, `before` each what is not timed and empties the cache of large arrays."""
        arguments = [jnp.ones(dims, dtype) for dims, dtype in self.shapes]
        took_s: list[float] = []
        began_s = time.perf_counter()
        while (spent_s := time.perf_counter() - began_s) < most_s and (len(took_s) < 6 or spent_s < least_s):
            if self.moved_bytes > CACHED_BYTES:
                before()
            start_s = time.perf_counter()
            result = jax.block_until_ready(self.compiled(*arguments))
            took_s.append(time.perf_counter() - start_s)
            for place, array in zip(self.reuse, jax.tree.leaves(result), strict=False):
                arguments[place] = array
        return took_s[1:] or took_s  # the first one warms up


def measure_cpu(program: Program) -> CpuPeaks:
    """Measure what the prediction of a program's time needs to know; two to three seconds."""
    began_s = time.perf_counter()
    empty, evict = Probe(lambda x: x + 1, (((), "float32"),)), _stream(2**26)
    probes: dict[Any, Probe] = {found: _product(found) for found in _most(products(program))}
    probes |= {found: _turn(found) for found in _most(turns(program))}
    small = STREAM_BYTES[:2]
    probes |= {("all", size): _streams_in_a_row(size) if size in small else _stream(size) for size in STREAM_BYTES}
    probes |= {("one", size): _single_stream(size) for size in STREAM_BYTES}
    probes["woken"] = _stream(small[0])
    fresh = Probe(lambda value: jnp.full((FRESH_BYTES // 4,), value), (((), "float32"),))
    probes |= {name: _element(getattr(jnp, name)) for name in ("exp", "tanh")}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Probe.compile, [empty, evict, fresh, *probes.values()]))
    with jax.set_mesh(jax.make_mesh((), (), devices=jax.devices()[:1])):
        source, target = jnp.ones(2**23), [jnp.ones(2**23)]

        def emptied_cache() -> None:
            target[0] = jax.block_until_ready(evict.compiled(source, target[0]))

        took = {key: probe.call_s(emptied_cache) for key, probe in probes.items()}
        call_s = empty.call_s(emptied_cache)
        # A virtual machine may have to ask its host for memory at first; a step uses the same again and again.
        fresh_s = min(fresh.calls_s(emptied_cache, most_s=0.25))
    small_s = took["all", small[0]] - call_s / IN_A_ROW
    woken_s = max(call_s, took["woken"] - small_s)
    for key, probe in probes.items():
        around_s = woken_s if probe.parallel else call_s
        took[key] = max(took[key] - around_s * probe.scale, took[key] / 4)
    streams = {size: took["all", size] for size in STREAM_BYTES}
    fresh_s -= call_s + streams[FRESH_BYTES] / 2  # a fill writes and reads nothing
    return CpuPeaks(
        product_s={key: took_s for key, took_s in took.items() if isinstance(key, Product)},
        turn_s={key: took_s for key, took_s in took.items() if isinstance(key, Turn)},
        stream_s=streams,
        single_stream_s={size: took["one", size] for size in STREAM_BYTES},
        fresh_s_per_byte=max(0.0, fresh_s / FRESH_BYTES),
        exp_s=took["exp"] / ELEMENTS,
        tanh_s=took["tanh"] / ELEMENTS,
        call_s=CALL_S,
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        took_s=time.perf_counter() - began_s,
    )


def _most(found: Counter[Work]) -> list[Work]:
    whole = found.total()
    return [work for work, share in found.items() if share >= LEAST_SHARE * whole]


def _product(asked: Product) -> Probe:
    part, dims, dtype = asked.part(MOST_FLOPS), (asked.summed, asked.batch), DTYPES.get(asked.dtype, "float32")
    return Probe(
        lambda x, y: jax.lax.dot_general(x, y, dims, precision="highest"),
        ((part.left, dtype), (part.right, dtype)),
        moved_bytes=4 * (math.prod(part.left) + math.prod(part.right)),
        scale=asked.flops / part.flops,
    )


def _turn(asked: Turn) -> Probe:
    """By one thread when the result is put into a larger array, as XLA does it."""
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
    )


def _stream(size: int) -> Probe:
    """From one array to another that is there already, so that no page is fresh."""
    array = ((size // 8,), "float32")
    return Probe(lambda x, out: x * 0.5 + 1.0, (array, array), reuse=(1,), moved_bytes=size)


def _streams_in_a_row(size: int) -> Probe:
    """As many passes over arrays of their own."""
    array = ((size // 8,), "float32")

    def passes(*arrays: jax.Array) -> list[jax.Array]:
        return [x * 0.5 + 1.0 for x in arrays[:IN_A_ROW]]

    reuse = tuple(range(IN_A_ROW, 2 * IN_A_ROW))
    return Probe(passes, (array,) * (2 * IN_A_ROW), reuse=reuse, scale=1 / IN_A_ROW)


def _single_stream(size: int) -> Probe:
    """XLA gives an update in place to one thread."""

    def update(x: jax.Array, out: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(out, x * 0.5 + 1.0, (0,))

    shapes = (((size // 8,), "float32"), ((size // 8 + 8,), "float32"))
    return Probe(update, shapes, reuse=(1,), moved_bytes=size, parallel=False)


def _element(function: Callable[[jax.Array], jax.Array]) -> Probe:
    array = ((ELEMENTS,), "float32")
    return Probe(lambda x, out: function(x) * 0.5, (array, array), reuse=(1,))
