"""Every matrix product of a compiled program: its sizes, its operations, and the instruction in whose time it runs.

The TPU compiler has one instruction for all of them, a convolution. A batch, a second summed axis or a second axis of
one factor become windows there: what a window does is read from its sizes, as in XLA's own count of operations.
"""

import re
from dataclasses import dataclass
from math import prod

from podling.hlo.program import Program
from podling.hlo.text import Instruction, Shape

PASSES = {"default": 1, "high": 3, "highest": 6}
"""Products of bfloat16 parts that a TPU makes for one of float32, by the precision asked for."""


@dataclass(frozen=True)
class Matmul:
    """`batch` products of [m, k] with [k, n]; n is that of the second operand."""

    batch: int
    m: int
    k: int
    n: int
    dtype: str  # of the narrower operand, by XLA's name
    passes: int  # of the matrix unit
    flops: int  # multiplications and additions, once
    name: str
    op_name: str
    computation: str  # it stands in this one,
    scheduled_in: str  # which runs inside this one,
    instruction: str  # as a part of this instruction: itself, unless it is fused


def find_matmuls(program: Program) -> list[Matmul]:
    """Every product of the program, in the order of the text."""
    found = []
    for computation, instruction in program.instructions():
        if instruction.opcode in ("dot", "convolution"):
            found.append(_matmul(program, computation, instruction))
    return found


def _matmul(program: Program, computation: str, product: Instruction) -> Matmul:
    here = program.computations[computation]
    left, right = (here[name].shapes[0] for name in product.operands[:2])
    sizes = _dot(product, left, right) if product.opcode == "dot" else _convolution(product, left, right)
    scheduled_in, instruction = program.scheduled_as(computation, product.name)
    asked = re.search(r"operand_precision=\{(\w+)", product.attributes)
    narrower = min((left, right), key=lambda shape: shape.bytes / max(shape.size, 1))
    return Matmul(
        *sizes[:4],
        dtype=narrower.dtype,
        passes=PASSES.get(asked[1], 1) if asked and narrower.dtype == "f32" else 1,
        flops=2 * sizes[4],
        name=product.name,
        op_name=product.op_name,
        computation=computation,
        scheduled_in=scheduled_in,
        instruction=instruction,
    )


Sizes = tuple[int, int, int, int, int]
"""batch, m, k, n, multiply-adds."""


def _dot(product: Instruction, left: Shape, right: Shape) -> Sizes:
    axes = {
        f"{side}_{role}": [int(axis) for axis in found.split(",") if axis]
        for side, role, found in re.findall(r"(lhs|rhs)_(batch|contracting)_dims=\{([\d,]*)\}", product.attributes)
    }
    batch = prod(left.dims[axis] for axis in axes.get("lhs_batch", []))
    k = prod(left.dims[axis] for axis in axes.get("lhs_contracting", []))
    m, n = (shape.size // max(1, batch * k) for shape in (left, right))
    return batch, m, k, n, batch * m * k * n


def _convolution(product: Instruction, left: Shape, right: Shape) -> Sizes:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes)
    if not labels:
        raise ValueError(f"a convolution without dim_labels: {product.name}")
    sides = [dict(zip(text, shape.dims, strict=True)) for text, shape in zip(
        labels.groups(), (left, right, product.shapes[0]), strict=True)]  # fmt: skip
    data, kernel, result = sides
    groups = re.search(r"feature_group_count=(\d+)", product.attributes)
    batches = re.search(r"batch_group_count=(\d+)", product.attributes)
    feature_groups, batch_groups = int(groups[1]) if groups else 1, int(batches[1]) if batches else 1
    batch, m = feature_groups * batch_groups, data["b"] // batch_groups
    k, n = kernel["i"], kernel["o"] // (feature_groups * batch_groups)
    adds = batch * m * k * n
    for axis, window in enumerate(_windows(product.attributes)):
        size_in, size_out = data[str(axis)], result[str(axis)]
        adds *= _meetings(window, size_in, size_out)
        match (size_in, window["size"], size_out):
            case (1, size, out) if size == out:
                n *= size
            case (inside, size, out) if inside == size == out:
                batch *= size
            case (_, size, out):  # positions are rows, places of the window are terms; one of them is 1 in a product
                m, k = m * out, k * size
    return batch, m, k, n, adds


def _windows(attributes: str) -> list[dict[str, int]]:
    """Of each spatial axis: size, stride, pad (before), lhs_dilate, rhs_dilate."""
    written = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in written[1].split()) if written else {}
    sizes = [int(size) for size in parts["size"].split("x")] if "size" in parts else []
    windows = [{"size": size, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1} for size in sizes]
    for key in ("stride", "pad", "lhs_dilate", "rhs_dilate"):
        for window, value in zip(windows, parts[key].split("x") if key in parts else [], strict=False):
            window[key] = int(value.split("_")[0])
    return windows


def _meetings(window: dict[str, int], size_in: int, size_out: int) -> int:
    """How many pairs of a window's place and an output's position meet an element and not padding or a gap."""
    dilated = (size_in - 1) * window["lhs_dilate"] + 1
    met = 0
    for place in range(window["size"]):
        first = place * window["rhs_dilate"] - window["pad"]
        ats = range(first, first + size_out * window["stride"], window["stride"])
        met += sum(0 <= at < dilated and at % window["lhs_dilate"] == 0 for at in ats)
    return met
