"""Which devices a run uses, and how fast they can be at best."""

import os
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podling.chips import chip_of
from podling.errors import InputError, Problem
from podling.parallel.hardware import accelerator


@dataclass(frozen=True)
class Peak:
    """The FLOP/s that MFU is a share of."""

    flops_per_s: float | None  # of one device; None when unknown
    source: str

    def __str__(self) -> str:
        return (
            self.source
            if self.flops_per_s is None
            else f"{self.flops_per_s / 1e9:,.0f} GFLOP/s a device, {self.source}"
        )


def select_devices(asked: str) -> list[Any]:
    """All devices of the asked kind; `auto` takes the best JAX has, and never a CPU beside an idle accelerator.

    Raises:
        InputError: the asked kind is not there, or an accelerator is there and JAX cannot use it.
    """
    try:
        found = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the second is how JAX says that no GPU answers
        why = str(error).split("\n")[0] or "no such device was found"
        fix = _install_hint(asked) if asked in ("tpu", "gpu") else "or say --device cpu"
        raise InputError(Problem("--device", f"JAX could not start on {asked}: {why}", fix)) from error
    if asked not in ("auto", found):
        what = f"{asked} was asked for, and JAX finds only {found}"
        raise InputError(Problem("--device", what, _install_hint(asked)))
    idle = accelerator() if found == "cpu" else None
    if asked == "auto" and idle and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise InputError(
            Problem("--device", f"this machine has a {idle.upper()} that JAX cannot use", _install_hint(idle))
        )
    return jax.devices()


def _install_hint(kind: str) -> str:
    if kind == "cpu":
        return "start Python with JAX_PLATFORMS=cpu"
    extra = {"tpu": "tpu", "gpu": "cuda"}[kind]
    return f"pip install 'podling[{extra}]', or say --device cpu to train on the CPU"


def compute_dtype(asked: str, platform: str) -> Any:
    """float32 or bfloat16; `auto` is bfloat16 where there is hardware for it."""
    if asked == "auto":
        asked = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(asked)


def peak_flops(devices: list[Any], dtype: Any, cpu_flops: float | None = None) -> Peak:
    """Peak of one device: published for accelerators, measured here for a CPU (its emulated devices share it).

    Args:
        devices: of this process.
        dtype: that is computed in.
        cpu_flops: this process's share of the CPU, where several processes share one and it is measured already.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        flops = cpu_flops or measure_cpu_flops(devices[0])
        return Peak(flops / len(devices), "measured: a 1536-cubed float32 matrix product here")
    name, chip = jnp.dtype(dtype).name, chip_of(kind)
    if chip is None or name not in chip.peak_flops:
        return Peak(None, f"no published {name} peak for {kind!r} in podling's table")
    return Peak(chip.peak_flops[name], f"published {name} peak of {kind}")


def measure_cpu_flops(device: Any) -> float:
    """FLOP/s of all of this machine's cores that the process may use."""
    return _measure_gemm(device)


def _measure_gemm(device: Any, size: int = 1536, repeats: int = 20, most_s: float = 0.3) -> float:
    """The best of the calls; they end after `most_s`, but there are three."""
    x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    took_s: list[float] = []
    while len(took_s) < 3 or (len(took_s) < repeats and sum(took_s) < most_s):
        start = time.perf_counter()
        product(x).block_until_ready()
        took_s.append(time.perf_counter() - start)
    return 2 * size**3 / min(took_s)
