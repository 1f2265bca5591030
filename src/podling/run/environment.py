"""What the bits of a run depend on besides its configuration: versions, devices, cores."""

import os
import platform
from typing import Any

import jax
import jaxlib.version

import podling

_NAMES = {
    "podling": "podling",
    "python": "Python",
    "jax": "JAX",
    "jaxlib": "jaxlib",
    "device": "device",
    "devices": "number of devices",
    "processes": "number of processes",
    "cpu_cores": "CPU cores",
}


def environment() -> dict[str, Any]:
    """The facts of this process, JSON-ready."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "podling": podling.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpu_cores": cores,
    }


def environment_changes(meta: dict[str, Any]) -> list[str]:
    """One line for each fact that differs from the one a checkpoint was saved under.

    A resume is bit-equal to never having stopped only when this is empty; otherwise the run goes on, equal up to
    rounding, and the person should read why.

    Args:
        meta: as `Checkpoints.restore` gives it.
    """
    saved, now = meta.get("environment", {}), environment()
    return [
        f"{words} changed: {saved[key]} → {now[key]}"
        for key, words in _NAMES.items()
        if key in saved and saved[key] != now[key]
    ]
