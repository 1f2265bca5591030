"""Reading a mesh from text; needs no JAX, so that a typing error is answered at once."""

from podling.config import did_you_mean
from podling.errors import Problem

MESH_AXES = ("data", "fsdp", "tensor")


def read_mesh(text: str) -> tuple[dict[str, int], list[Problem]]:
    """The sizes in `data=4,tensor=2` (1 for an axis that is not named), and everything wrong with them."""
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in MESH_AXES:
            problems.append(Problem("--mesh", f"unknown axis {axis!r}", did_you_mean(axis, MESH_AXES)))
        elif axis in sizes:
            problems.append(Problem("--mesh", f"axis {axis!r} is given twice"))
        elif not size.isdecimal() or int(size) < 1:
            problems.append(Problem("--mesh", f"{part.strip()!r} needs a positive size", f"for example {axis}=2"))
        else:
            sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}, problems
