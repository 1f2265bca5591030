"""The platform is chosen before JAX is imported."""

import os
import sys
from importlib.util import find_spec

from podling.errors import InputError, Problem
from podling.parallel.hardware import accelerator
from podling.startup import use_one_heap

COUNT = "JAX_NUM_CPU_DEVICES"


def choose_platform(device: str) -> None:
    """Tell JAX which platform `--device` means, before its first import.

    JAX would otherwise try each platform it has a plugin for: a slow look-up of a TPU that is not there, with an
    error on the terminal, before it settles for the CPU. What the environment already says is left alone; whether
    the asked device is there is checked once JAX runs. In a process that has imported JAX already it is too late, and
    that check decides alone.

    Args:
        device: `auto`, `cpu`, `gpu` or `tpu`.

    Raises:
        InputError: the environment asks for a number of CPU devices that is none; JAX would end in a traceback.
    """
    if "jax" in sys.modules:
        return
    count = os.environ.get(COUNT)
    if count is not None and not (count.isdecimal() and int(count) > 0):
        raise InputError(
            Problem(COUNT, f"{count!r} is no whole number from 1 up", f"for example {COUNT}=8, or unset it")
        )
    if device in ("auto", "cpu") and accelerator() is None:
        use_one_heap()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # C++ information and warnings
    if os.environ.get("JAX_PLATFORMS"):
        return
    names = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
    if device in names:
        os.environ["JAX_PLATFORMS"] = names[device]
    elif find_spec("libtpu") and accelerator() is None:  # the TPU compiler is here and no TPU
        os.environ["JAX_PLATFORMS"] = "cpu"
