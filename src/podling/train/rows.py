"""Rows of a global batch: which of them this process's devices hold, and how they get there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from podling.data.batches import Batch
from podling.parallel.mesh import batch_sharding
from podling.train.step import DeviceBatch


def rows_here(sharding: NamedSharding, rows: int, axis: int) -> list[int]:
    """Numbers of the rows that some device of this process holds, ascending; all of them in a single process.

    Args:
        sharding: of the global array.
        rows: the size of its axis `axis`.
        axis: which of its axes are the rows.
    """
    shape = [1] * max(len(sharding.spec), axis + 1)
    shape[axis] = rows
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return sorted({row for index in indices if index is not None for row in range(rows)[index[axis]]})


def place(arrays: Any, sharding: NamedSharding, rows: int, axis: int) -> Any:
    """Global arrays out of this process's rows of them; each device gets the rows it holds.

    Args:
        arrays: pytree of NumPy arrays of one shape that hold the rows of `rows_here`, in their order.
        sharding: of the global arrays.
        rows: rows of a global array.
        axis: which axis are the rows.
    """
    shape = list(jax.tree.leaves(arrays)[0].shape)
    shape[axis] = rows
    return jax.make_array_from_process_local_data(sharding, arrays, tuple(shape))


def batch_layout(mesh: Mesh) -> NamedSharding:
    """Where a step's sequences lie."""
    return batch_sharding(mesh, "micro", "batch", "sequence")


def put_batch(batch: Batch, mesh: Mesh, rows: int) -> DeviceBatch:
    """Lay a batch out over the mesh: this process's rows go to its devices.

    Args:
        batch: the rows of `rows_here`.
        mesh: of all processes.
        rows: of a whole micro-batch.
    """
    return DeviceBatch(*place((batch.inputs, batch.targets, batch.weights), batch_layout(mesh), rows, axis=1))


def checksum(tokens: Any, xp: Any = np) -> Any:
    """A uint32 that depends on every token and its place.

    Args:
        tokens: int32 [M, B, T], of NumPy, or a global array inside jit.
        xp: `numpy` or `jax.numpy`.
    """
    sizes = tokens.shape
    micro, row, place = (xp.arange(size, dtype=xp.uint32) for size in sizes)
    where = micro[:, None, None] * (sizes[1] * sizes[2]) + row[None, :, None] * sizes[2] + place[None, None, :]
    mixed = tokens.astype(xp.uint32) * xp.uint32(0x9E3779B1) + where * xp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 15)) * xp.uint32(0xC2B2AE3D)
    return (mixed ^ (mixed >> 13)).sum(dtype=xp.uint32)


def device_checksum(tokens: jax.Array) -> int:
    """`checksum` of a global array, computed by all devices that hold parts of it."""
    return int(jax.device_get(jax.jit(lambda x: checksum(x, jnp))(tokens)))
