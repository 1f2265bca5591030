"""How the C library hands out memory while a CPU trains. Needs no JAX.

XLA asks for a step's temporaries anew at every step. Those of some size glibc maps, and unmaps after the step, so the
kernel clears every page again: of a step of 44 ms (4 layers of 128, 768 tokens, 2 cores), 13. Memory that stays with
the process is there already. Settings are asked of glibc in the running process (`man mallopt`); what a person has set
in the environment stays, and other C libraries are left alone.
"""

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # mallopt's names, from malloc.h
OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
MOST_CORES = 8
"""Threads of one heap wait for one another. With so few they hardly do; more were not measured."""
KEPT_SHARE = 1 / 16
"""Of the machine's memory. A heap that is never given back gets holes that a step's temporaries do not fit into again:
at 124M parameters, 1.3 GB of temporaries, it grew from 3.0 to 4.3 GB and stayed there in the steps that were watched.
Nothing bounds it but this share of what is kept at a time."""

_one_heap = False


def use_one_heap() -> bool:
    """Before JAX starts its threads: all of them take memory from one heap, which can be kept.

    Returns:
        Whether they do now.
    """
    global _one_heap
    libc = _glibc()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if libc is None or cores > MOST_CORES or any(name.startswith(OWN) for name in os.environ):
        return False
    _one_heap = libc.mallopt(ARENA_MAX, 1) == 1
    return _one_heap


def keep_memory(temporary_bytes: int, machine_bytes: int) -> bool:
    """Let what a step takes stay with the process, from here on: no page of it is cleared twice.

    Args:
        temporary_bytes: of the step, over all devices.
        machine_bytes: all memory of the machine.

    Returns:
        Whether it will.
    """
    libc = _glibc()
    if not _one_heap or libc is None or temporary_bytes > KEPT_SHARE * machine_bytes:
        return False
    libc.malloc_trim(0)  # what starting has left is given back first
    return bool(libc.mallopt(MMAP_MAX, 0) == 1 and libc.mallopt(TRIM_THRESHOLD, -1) == 1)


def _glibc() -> ctypes.CDLL | None:
    if not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return None
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        return None
    return ctypes.CDLL(None) if version and version.startswith("glibc") else None
