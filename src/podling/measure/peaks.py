"""What this machine can do at best, measured: matrix products, and reading memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podling.parallel.device import Peak, peak_flops

PRODUCT = 4096
"""Side of an accelerator's square matrices: large enough for any matrix unit."""
IN_A_ROW = 8
"""Products of one call, so that calling does not count."""
READ_BYTES = 2**28  # more than any cache holds
REPEATS = 5


@dataclass(frozen=True)
class Peaks:
    """Of one device."""

    flops_per_s: float
    flops_source: str
    read_bytes_per_s: float
    published: Peak | None
    """What the chip's data sheet says; None for a CPU."""


def measure_peaks(devices: list[Any], dtype: Any) -> Peaks:
    """Measure the first device.

    Args:
        devices: of this process, all of one kind. CPUs of one machine share its cores.
        dtype: of the compute.
    """
    read_bytes_per_s = READ_BYTES / reading_s(devices[0], READ_BYTES, dtype) / _sharing(devices)
    peak = peak_flops(devices, dtype)
    if devices[0].platform == "cpu":  # measured, as for training's MFU
        assert peak.flops_per_s is not None
        return Peaks(peak.flops_per_s, peak.source, read_bytes_per_s, None)
    took_s = _best_s(devices[0], *_products(dtype))
    source = f"measured: {PRODUCT}-cubed {dtype.name} matrix products here"
    return Peaks(IN_A_ROW * 2 * PRODUCT**3 / took_s, source, read_bytes_per_s, peak)


def _sharing(devices: list[Any]) -> int:
    return len(devices) if devices[0].platform == "cpu" else 1


def _products(dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None  # as the model asks for
    matrix = jnp.full((PRODUCT, PRODUCT), 1 / PRODUCT, dtype)

    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, IN_A_ROW, lambda _, z: jnp.matmul(z, y, precision=precision), x)

    return products, (matrix, matrix)


def reading_s(device: Any, read_bytes: int, dtype: Any) -> float:
    """Seconds in which a device reads so much, again and again: a matrix times a vector, as decoding reads weights.

    What fits into a processor's caches is read from there, as weights are.
    """
    columns = 1024
    rows = max(1, read_bytes // dtype.itemsize // columns)
    args = jnp.ones((rows, columns), dtype), jnp.ones((columns,), dtype)
    return (
        _best_s(device, lambda matrix, vector: matrix @ vector, args) * read_bytes / (rows * columns * dtype.itemsize)
    )


def _best_s(device: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    args = jax.device_put(args, device)
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))
    best_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
