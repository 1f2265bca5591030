"""What a CPU program is made of, in the terms in which a CPU's speed is measured. No JAX."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

from podling.hlo.program import Program
from podling.hlo.text import Computation, Instruction

Axes = tuple[int, ...]
MOVES = {"parameter", "transpose", "copy", "bitcast", "reshape", "reduce-precision", "slice", "constant"}
"""Opcodes of a fusion that only moves."""


@dataclass(frozen=True)
class Product:
    """A matrix product as a program states it."""

    left: Axes
    right: Axes
    summed: tuple[Axes, Axes]  # axes of left and of right
    batch: tuple[Axes, Axes]
    dtype: str  # by XLA's name

    @property
    def flops(self) -> int:
        both = math.prod(self.left[axis] for axis in (*self.summed[0], *self.batch[0]))
        return 2 * math.prod(self.left) * math.prod(self.right) // both

    def part(self, most_flops: float) -> "Product":
        """This product with its longest axes halved until it has no more operations than that."""
        left, right = list(self.left), list(self.right)
        pairs = [*zip(*self.summed, strict=True), *zip(*self.batch, strict=True)]
        found = self
        while found.flops > most_flops:
            longest = max(left + right)
            here, there, both = (left, right, pairs) if longest in left else (right, left, [(b, a) for a, b in pairs])
            axis = here.index(longest)
            here[axis] //= 2
            for mine, other in both:
                if mine == axis:
                    there[other] //= 2
            found = Product(tuple(left), tuple(right), self.summed, self.batch, self.dtype)
        return found


@dataclass(frozen=True)
class Turn:
    """A copy whose elements lie in another order."""

    dims: Axes
    order: Axes
    dtype: str
    plain: bool  # nothing is computed on the way: XLA then copies tile by tile
    parallel: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    def part(self, most: int) -> "Turn":
        """This copy of a smaller array, its axes halved, those along which it reads and writes last."""
        dims = list(self.dims)
        strides = {len(dims) - 1, self.order[-1]}  # the axes that decide how far apart neighbours are
        while math.prod(dims) > most:
            axes = [axis for axis in range(len(dims)) if axis not in strides and dims[axis] > 1] or range(len(dims))
            axis = max(axes, key=lambda axis: dims[axis])
            dims[axis] //= 2
        return replace(self, dims=tuple(dims))


def product(here: Computation, dot: Instruction) -> Product:
    """A `dot` of a computation."""
    left, right = (here[name].shapes[0] for name in dot.operands)
    summed, batch = (
        (_numbers(dot, f"lhs_{kind}_dims"), _numbers(dot, f"rhs_{kind}_dims")) for kind in ("contracting", "batch")
    )
    return Product(left.dims, right.dims, summed, batch, left.dtype)


def turn(within: Computation, *, parallel: bool) -> Turn | None:
    """The transposition by which a fusion reads across the rows of an array; None when it reads along them.

    Only the last axis matters: elements next to one another in the result are then far apart in what is read. Two
    transpositions in a row may bring it back.
    """
    plain = {instruction.opcode for instruction in within.values()} <= MOVES
    known: dict[str, Turn | None] = {}
    for value in within.values():
        across = next((found for name in value.operands if (found := known.get(name))), None)
        order = _numbers(value, "dimensions") if value.opcode == "transpose" else ()
        if order:
            dims = within[value.operands[0]].shapes[0].dims
            long = [axis for axis in order if dims[axis] > 1]
            if long and long[-1] != max(long):
                across = None if across else Turn(dims, order, value.shapes[0].dtype, plain, parallel)
        known[value.name] = across
        if value.root:
            return across
    return None


def written(within: Computation) -> int:
    """Elements that a fusion writes: all of its result, or the part that it updates in place."""
    updates = [value for value in within.values() if value.opcode == "dynamic-update-slice"]
    if updates:
        return sum(within[update.operands[1]].shapes[0].size for update in updates)
    return sum(shape.size for value in within.values() if value.root for shape in value.shapes)


def in_parallel(instruction: Instruction) -> bool:
    """XLA writes down into how many parts it cuts a loop; its library calls and copies are cut where they run."""
    loop = instruction.opcode == "fusion" and "__ynn" not in instruction.config
    return not loop or 'outer_dimension_partitions":["' in instruction.config


def products(program: Program) -> Counter[Product]:
    """The matrix products of a program, and how many operations of a step each stands for."""
    found: Counter[Product] = Counter()
    for name, instruction in program.instructions():
        if instruction.opcode == "dot":
            one = product(program.computations[name], instruction)
            found[one] += one.flops * program.times[program.scheduled_in(name)]
    return found


def turns(program: Program) -> Counter[Turn]:
    """The transposing copies of a program, and how many elements of a step each writes."""
    found: Counter[Turn] = Counter()
    for name, instruction in program.instructions():
        if instruction.opcode == "fusion":
            within = program.computations[instruction.calls[0][1]]
            if one := turn(within, parallel=in_parallel(instruction)):
                found[one] += written(within) * program.times[name]
    return found


def _numbers(instruction: Instruction, attribute: str) -> Axes:
    found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", instruction.attributes)
    return tuple(int(axis) for axis in found[1].split(",")) if found and found[1] else ()
