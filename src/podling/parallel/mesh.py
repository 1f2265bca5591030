"""The hardware mesh: devices arranged over the axes data, fsdp and tensor, with explicit axis types.

Always all three axes, of size 1 where unused, so that one code path serves one device or a thousand.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from podling.errors import InputError, Problem, raise_if
from podling.parallel.axes import MESH_AXES, read_mesh
from podling.parallel.rules import activation_spec, storage_spec


def mesh_sizes(text: str, devices: int) -> dict[str, int]:
    """Read `auto` (all devices on data) or `data=4,tensor=2` for this many devices.

    Raises:
        InputError: text that names no mesh, or one that is not of this many devices.
    """
    if text == "auto":
        return {**dict.fromkeys(MESH_AXES, 1), "data": devices}
    sizes, problems = read_mesh(text)
    raise_if(problems)
    product = math.prod(sizes.values())
    if product != devices:
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        what = f"{shown} is {product} devices, and there are {devices}"
        raise InputError(Problem("--mesh", what, f"make the product {devices}, for example data={devices}"))
    return sizes


def make_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange the devices (default: all) as `mesh_sizes` reads `text`."""
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(text, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES), devices=devices
    )


def data_parallel(mesh: Mesh) -> int:
    """How many ways a batch is split: data x fsdp."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def storage_sharding(mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
    """Sharding in which a parameter with these logical axes rests on `mesh`."""
    return NamedSharding(mesh, storage_spec(axes))


def batch_sharding(mesh: Mesh, *axes: str) -> NamedSharding:
    """Sharding of an activation or batch array with these logical axes on `mesh`."""
    return NamedSharding(mesh, activation_spec(axes))
