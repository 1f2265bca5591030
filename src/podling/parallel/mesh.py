"""The hardware mesh: devices arranged over the axes data, fsdp and tensor, with explicit axis types.

Always all three axes, of size 1 where unused, so that one code path serves one device or a thousand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from podling.errors import raise_if
from podling.parallel.axes import (
    MESH_AXES,
    batch_ways,
    count_problem,
    listed_meshes,
    nearest_meshes,
    read_mesh,
    slices_problem,
)
from podling.parallel.rules import activation_spec, storage_spec

EXPLICIT = (AxisType.Explicit,) * len(MESH_AXES)


def mesh_sizes(text: str, devices: int) -> dict[str, int]:
    """Read `data=4,tensor=2` for this many devices, whatever is laid over them; `auto` is all of them on data.

    What `auto` is for a model that is trained, `train.auto_mesh` decides.

    Raises:
        InputError: text that names no mesh, or one that is not of this many devices.
    """
    if text == "auto":
        return {**dict.fromkeys(MESH_AXES, 1), "data": devices}
    sizes, problems = read_mesh(text)
    raise_if(problems)
    raise_if(count_problem(sizes, devices, f"nearest --mesh: {listed_meshes(nearest_meshes(sizes, devices))}"))
    return sizes


def make_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange the devices (default: all, of every process) as `mesh_sizes` reads `text`.

    JAX places neighbours on the mesh on neighbouring chips. Elsewhere the order is that of the devices, process after
    process, so that tensor and then fsdp stay within a process where their sizes allow it, and data goes across.
    Slices of TPUs, which only the data centre's network joins, follow one another along data, each arranged as it would
    be alone.

    Raises:
        InputError: as `mesh_sizes`; or data does not go over the slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(text, len(devices))
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(slices) == 1:
        return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=EXPLICIT, devices=devices)
    if devices[0].platform != "tpu":  # JAX calls machines with GPUs slices too
        return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), MESH_AXES, axis_types=EXPLICIT)
    raise_if(slices_problem(sizes, len(slices)))
    within = (sizes["data"] // len(slices), sizes["fsdp"], sizes["tensor"])
    each = [jax.make_mesh(within, MESH_AXES, devices=slices[index]).devices for index in sorted(slices)]
    return Mesh(np.concatenate(each), MESH_AXES, axis_types=EXPLICIT)


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these sizes without devices: enough to trace with, and to know every shape."""
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=EXPLICIT)


def data_parallel(mesh: Mesh) -> int:
    """How many ways a batch is split: data x fsdp."""
    return batch_ways(mesh.shape)


def storage_sharding(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> NamedSharding:
    """Sharding in which a parameter with these logical axes rests on `mesh`."""
    return NamedSharding(mesh, storage_spec(axes))


def batch_sharding(mesh: Mesh | AbstractMesh, *axes: str) -> NamedSharding:
    """Sharding of an activation or batch array with these logical axes on `mesh`."""
    return NamedSharding(mesh, activation_spec(axes))
