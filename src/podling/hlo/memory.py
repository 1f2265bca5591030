"""The arrays a compiled program really makes: what is inside a fusion stays in registers and is not counted."""

from collections.abc import Iterator
from dataclasses import dataclass

from podling.hlo.program import Program
from podling.hlo.text import Instruction, Shape

PLUMBING = ("tuple", "get-tuple-element", "while", "conditional", "call", "bitcast", "opt-barrier")
"""Opcodes that make nothing: their arrays are another instruction's."""


@dataclass(frozen=True)
class Held:
    """One array that an instruction makes, on one device."""

    shape: Shape
    instruction: Instruction
    computation: str


def held(program: Program) -> Iterator[Held]:
    """Every array that some instruction makes, parameters of the program included, in the order of the text."""
    for name, computation in program.computations.items():
        if not _is_executed(program, name):
            continue
        for instruction in computation.values():
            if instruction.opcode in PLUMBING or (instruction.opcode == "parameter" and name != program.entry):
                continue
            for shape in instruction.shapes:
                yield Held(shape, instruction, name)


def largest(program: Program, count: int = 10) -> list[tuple[Shape, list[Held]]]:
    """The `count` largest shapes with all that make an array of it, most bytes first."""
    by_shape: dict[Shape, list[Held]] = {}
    for array in held(program):
        by_shape.setdefault(array.shape, []).append(array)
    return sorted(by_shape.items(), key=lambda item: -item[0].bytes)[:count]


def _is_executed(program: Program, name: str) -> bool:
    """Whether a computation runs as a schedule of its own, and not inside a fusion or once per element."""
    if name == program.entry:
        return True
    return any(
        call.instruction.opcode in ("while", "conditional", "call", "async-start") for call in program.callers[name]
    )
