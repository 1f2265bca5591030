"""How fast this CPU is at what a compiled step is made of, measured by small programs of XLA's own. No step is timed.

Measured are matrix products and transposing copies of the sizes that a program states (a CPU's speed at either
differs tenfold with their shape), passes over arrays in cache and in memory by one thread and by all, the first touch
of fresh pages, and exp and tanh.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from podling.cost.cpu_load import BUSY_SHARE, OtherWork, cores_here
from podling.cost.cpu_probes import (
    ELEMENTS,
    IN_A_ROW,
    Probe,
    element,
    product_probe,
    single_stream,
    stream,
    streams_in_a_row,
    turn_probe,
)
from podling.cost.cpu_work import Product, Turn, products, turns
from podling.files import counted
from podling.hlo.program import Program

LIMIT_S = 4.0
"""Of all measuring together. A quiet machine needs less; on a busy one calls are repeated less often, and what is small
in a step is left out."""
COMPILING_S, REPEATING_S, CALLING_S = 0.4 * LIMIT_S, 0.65 * LIMIT_S, 0.85 * LIMIT_S
"""From here on what can be left out is not compiled; calls are repeated no more; what can be left out is not called."""
LARGE_SPREAD = 0.3
"""Of calls of one program. On a quiet machine they are within a few percent of one another."""
LEAST_SHARE = 0.02
"""A product or a transposition that is less of a step goes by the speed of the others."""
STREAM_BYTES = tuple(2**power for power in (20, 22, 24, 26))  # read and written by a measured pass
FRESH_BYTES = 2**26
CALL_S = 2e-6
"""Handing an instruction to XLA's threads; too short to be measured from outside, and of no weight."""

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
    others: float | None = None  # cores that other work kept busy meanwhile; None where the system does not say
    spread: float = 0.0  # how far apart the middle half of the calls of one program are, as a share of their median
    took_s: float = field(default=0.0, compare=False)

    @property
    def disturbed(self) -> str:
        """What makes these speeds uncertain, in words; empty on a quiet machine."""
        if self.others is not None and self.others > BUSY_SHARE * self.threads:
            return f"other work kept {self.others:.1f} of {counted(self.threads, 'core')} busy"
        if self.spread > LARGE_SPREAD:
            return f"they varied by {self.spread:.0%} from one call to the next"
        return ""

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


def measure_cpu(program: Program) -> CpuPeaks:
    """Measure what the prediction of a program's time needs to know; two to three seconds, and at most about four."""
    began_s, others = time.perf_counter(), OtherWork()
    late_s = began_s + REPEATING_S
    empty, evict = Probe(lambda x: x + 1, (((), "float32"),)), stream(2**26)
    small = STREAM_BYTES[:2]
    probes: dict[Any, Probe] = {
        ("all", size): streams_in_a_row(size) if size in small else stream(size) for size in STREAM_BYTES
    }
    probes |= {("one", size): single_stream(size) for size in STREAM_BYTES}
    probes["woken"] = stream(small[0])
    fresh = Probe(lambda value: jnp.full((FRESH_BYTES // 4,), value), (((), "float32"),))
    probes |= {name: element(getattr(jnp, name)) for name in ("exp", "tanh")}
    for index, found in enumerate(_most(products(program))):
        probes[found] = product_probe(found, needed=index == 0)
    probes |= {found: turn_probe(found) for found in _most(turns(program))}
    with ThreadPoolExecutor(2) as pool:
        compiled = partial(Probe.compile, late_s=began_s + COMPILING_S)
        list(pool.map(compiled, [empty, evict, fresh, *probes.values()]))
    with jax.set_mesh(jax.make_mesh((), (), devices=jax.devices()[:1])):
        source, target = jnp.ones(2**23), [jnp.ones(2**23)]

        def emptied_cache() -> None:
            target[0] = jax.block_until_ready(evict.compiled(source, target[0]))

        took = {}
        for key, probe in probes.items():
            if probe.needed or (probe.compiled and time.perf_counter() < began_s + CALLING_S):
                took[key] = probe.call_s(emptied_cache, late_s)
        call_s = empty.call_s(emptied_cache, late_s)
        # A virtual machine may have to ask its host for memory at first; a step uses the same again and again.
        fresh_s = min(fresh.calls_s(emptied_cache, late_s, most_s=0.25))
    small_s = took["all", small[0]] - call_s / IN_A_ROW
    woken_s = max(call_s, took["woken"] - small_s)
    for key, call_took_s in took.items():
        around_s = woken_s if probes[key].parallel else call_s
        took[key] = max(call_took_s - around_s * probes[key].scale, call_took_s / 4)
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
        threads=len(cores_here()),
        others=others.cores(),
        spread=statistics.median([probe.spread for probe in probes.values() if probe.spread is not None] or [0.0]),
        took_s=time.perf_counter() - began_s,
    )


def _most(found: Counter[Work]) -> list[Work]:
    whole = found.total()
    return [work for work, share in found.most_common() if share >= LEAST_SHARE * whole]
