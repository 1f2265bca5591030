"""The hardware mesh: devices arranged over the axes data, fsdp and tensor, with explicit axis types.

Always all three axes, of size 1 where unused, so that one code path serves one device or a thousand.
"""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from podling.config import did_you_mean
from podling.errors import InputError, Problem
from podling.parallel.rules import MESH_AXES, activation_spec, storage_spec


def parse_mesh(text: str, devices: int) -> dict[str, int]:
    """Read `auto` or `data=4,tensor=2` for this many devices.

    Raises:
        InputError: an unknown or repeated axis, a size that is no positive integer, or a product that is not the
            device count.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    if text == "auto":
        return {**sizes, "data": devices}
    problems: list[Problem] = []
    seen: set[str] = set()
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in sizes:
            problems.append(Problem("--mesh", f"unknown axis {axis!r}", did_you_mean(axis, MESH_AXES)))
        elif axis in seen:
            problems.append(Problem("--mesh", f"axis {axis!r} is given twice"))
        elif not size.isdecimal() or int(size) < 1:
            problems.append(Problem("--mesh", f"{part.strip()!r} needs a positive size", f"for example {axis}=2"))
        else:
            seen.add(axis)
            sizes[axis] = int(size)
    if not problems and math.prod(sizes.values()) != devices:
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        problems.append(
            Problem("--mesh", f"{shown} is {math.prod(sizes.values())} devices, and there are {devices}",
                    f"make the product {devices}, for example data={devices}")
        )  # fmt: skip
    if problems:
        raise InputError(problems)
    return sizes


def make_mesh(text: str, devices: list[jax.Device] | None = None) -> Mesh:
    """Arrange the devices (default: all) as `parse_mesh` reads `text`."""
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(text, len(devices))
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
