"""Meshes as text and as sizes; needs no JAX, so that a typing error is answered at once."""

import math
from collections.abc import Callable, Mapping

from podling.config import did_you_mean
from podling.errors import Problem

MESH_AXES = ("data", "fsdp", "tensor")


def read_mesh(text: str) -> tuple[dict[str, int], list[Problem]]:
    """The sizes in `data=4,tensor=2` (1 for an axis that is not named), and everything wrong with them."""
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            what = f"{text!r} has an empty part" if text.strip() else "is empty"
            problems.append(Problem("--mesh", what, "give auto, or sizes such as data=4,tensor=2"))
        elif axis not in MESH_AXES:
            problems.append(Problem("--mesh", f"unknown axis {axis!r}", did_you_mean(axis, MESH_AXES)))
        elif axis in sizes:
            problems.append(Problem("--mesh", f"axis {axis!r} is given twice"))
        elif not size.isdecimal() or int(size) < 1:
            problems.append(
                Problem("--mesh", f"{part.strip()!r} needs a whole number from 1 up", f"for example {axis}=2")
            )
        else:
            sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}, problems


def mesh_text(sizes: Mapping[str, int]) -> str:
    """What to type after `--mesh` for these sizes; axes of size 1 are left out."""
    return ",".join(f"{axis}={sizes[axis]}" for axis in MESH_AXES if sizes[axis] > 1) or "data=1"


def batch_ways(sizes: Mapping[str, int]) -> int:
    """How many ways the rows of a batch are split: data x fsdp."""
    return sizes["data"] * sizes["fsdp"]


def factorisations(devices: int) -> list[dict[str, int]]:
    """Every mesh of this many devices, those with little tensor and then little fsdp first."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    return [
        {"data": devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}
        for tensor in divisors
        for fsdp in divisors
        if devices % (tensor * fsdp) == 0
    ]


def nearest_meshes(
    sizes: Mapping[str, int], devices: int, fits: Callable[[Mapping[str, int]], bool] = lambda sizes: True
) -> list[dict[str, int]]:
    """The meshes of this many devices that fit, nearest first.

    That is fewest doublings away from `sizes` over all axes, and of those the one that shards the state as far.
    """

    def distance(mesh: Mapping[str, int]) -> tuple[float, float]:
        doublings = {axis: math.log2(mesh[axis] / sizes[axis]) for axis in MESH_AXES}
        return sum(map(abs, doublings.values())), abs(doublings["fsdp"] + doublings["tensor"])

    return sorted(filter(fits, factorisations(devices)), key=distance)


def listed_meshes(meshes: list[dict[str, int]], most: int = 4) -> str:
    """The first few meshes as text, and how many more there are."""
    more = f" (and {len(meshes) - most} more)" if len(meshes) > most else ""
    return "; ".join(map(mesh_text, meshes[:most])) + more


def count_problem(sizes: Mapping[str, int], devices: int, remedy: str) -> list[Problem]:
    """What is wrong when a mesh is not of this many devices."""
    product = math.prod(sizes.values())
    if product == devices:
        return []
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return [Problem("--mesh", f"{shown} is {product} devices, and there are {devices}", remedy)]


def slices_problem(sizes: Mapping[str, int], slices: int) -> list[Problem]:
    """What is wrong when slices of TPUs cannot follow one another along data."""
    if sizes["data"] % slices == 0:
        return []
    what = f"data={sizes['data']} is no multiple of {slices}: the {slices} TPU slices follow one another along data"
    devices = math.prod(sizes.values())
    meshes = nearest_meshes(sizes, devices, lambda mesh: mesh["data"] % slices == 0)
    return [Problem("--mesh", what, f"nearest --mesh: {listed_meshes(meshes)}" if meshes else "")]
