"""Which arrays are in device memory at each moment of a compiled program, and when most is.

The text is a schedule: an array is there from the instruction that makes it to the last that reads it. Loops update
what they carry in place, donated arguments are written over, and where the compiler says that a result shares its
operand's memory (or where it is the operand with a piece replaced) nothing new is made.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from podling.hlo.program import Program
from podling.hlo.text import Computation, Instruction, Shape, root

SAME = ("bitcast", "get-tuple-element", "tuple", "opt-barrier", "while", "domain", "after-all")
"""Opcodes that make no array of their own."""
_ALIASES = re.compile(r'\{"indices":\["(\d+)","(\d+)"\]\}')


@dataclass(eq=False)
class Buffer:
    """One array in device memory."""

    shape: Shape
    made_by: Instruction
    computation: str
    device_bytes: int  # with padding to whole tiles; 0 if it is another's memory
    written_by: list[tuple[str, Instruction]] = field(default_factory=list)  # in loops, and where from

    @property
    def argument(self) -> bool:
        return self.made_by.opcode == "parameter"


Leaves = list[Buffer | None]
"""A value's arrays in order; None for what is no array in main memory."""


@dataclass(frozen=True)
class Moment:
    """What is held at some instruction."""

    buffers: tuple[Buffer, ...]

    @property
    def device_bytes(self) -> int:
        return sum(buffer.device_bytes for buffer in self.buffers)


def fullest(program: Program) -> Moment:
    """The moment at which most is held, arguments included."""
    entry = program.computations[program.entry]
    arguments: list[Buffer] = []
    for instruction in entry.values():
        if instruction.opcode == "parameter":
            arguments += [_new(shape, instruction, program.entry) for shape in instruction.shapes if shape.space == 0]
    # Arguments stay to the end: they are donated and written over, or the caller's.
    others = _Walk(program, program.entry, None, {one.made_by.name: one for one in arguments}).fullest()
    return Moment((*arguments, *others))


def _new(shape: Shape, instruction: Instruction, computation: str) -> Buffer:
    return Buffer(shape, instruction, computation, shape.padded_bytes)


class _Walk:
    """One computation's schedule."""

    def __init__(self, program: Program, name: str, carried: Leaves | None, arguments: dict[str, Buffer]):
        self.program, self.name, self.carried, self.arguments = program, name, carried, arguments
        self.here: Computation = program.computations[name]
        self.values: dict[str, Leaves] = {}
        self.inner: dict[str, list[Buffer]] = {}  # what loops and branches hold beside their operands, at most
        self.own: list[Buffer] = []

    def fullest(self) -> list[Buffer]:
        """The arrays there when most is held; in a loop without what is carried."""
        order = list(self.here.values())
        for instruction in order:
            self.values[instruction.name] = self._leaves(instruction)
        self._settle_result()
        spans = self._spans(order)
        best: list[Buffer] = []
        best_bytes = -1
        for index, instruction in enumerate(order):
            inside = self.inner.get(instruction.name, [])
            now = self._sum(spans, index) + sum(buffer.device_bytes for buffer in inside)
            if now > best_bytes:
                best_bytes = now
                best = [b for b, (first, last) in spans.items() if first <= index <= last] + inside
        return best

    def _sum(self, spans: dict[Buffer, tuple[int, int]], index: int) -> int:
        return sum(buffer.device_bytes for buffer, (first, last) in spans.items() if first <= index <= last)

    def _spans(self, order: list[Instruction]) -> dict[Buffer, tuple[int, int]]:
        """First and last instruction of every array that this computation makes."""
        spans: dict[Buffer, tuple[int, int]] = {}
        for index, instruction in enumerate(order):
            touched: Iterable[Buffer | None] = self.values[instruction.name]
            if instruction.opcode not in ("tuple", "get-tuple-element", "bitcast"):  # those read nothing
                touched = [*touched, *(leaf for name in instruction.operands for leaf in self.values.get(name, []))]
            for leaf in touched:
                if leaf is not None:
                    spans[leaf] = (spans.get(leaf, (index, index))[0], index)
        owned = set(self.own)
        return {buffer: span for buffer, span in spans.items() if buffer in owned}

    def _settle_result(self) -> None:
        """What a loop's body returns lies in what it carries; what the program returns, in donated arguments."""
        result = self.values[root(self.here).name]
        if self.carried is not None:
            for made, place in zip(result, self.carried, strict=False):
                if made is not None and place is not None and made in self.own:
                    made.device_bytes = 0
                    place.written_by.append((self.name, made.made_by))
        elif self.arguments:
            for made in result:
                if made is not None and made in self.own and made.shape in {a.shape for a in self.arguments.values()}:
                    made.device_bytes = 0

    def _leaves(self, instruction: Instruction) -> Leaves:
        opcode, operands = instruction.opcode, [self.values.get(name, []) for name in instruction.operands]
        if opcode == "parameter":
            if self.carried is not None:
                return self.carried
            argument = self.arguments.get(instruction.name)
            return [argument] if argument else [None] * len(instruction.shapes)
        if opcode == "get-tuple-element":
            return [operands[0][int(instruction.attribute("index"))]]
        if opcode in ("tuple", "bitcast", "opt-barrier", "domain", "after-all"):
            return [leaf for leaves in operands for leaf in leaves]
        if opcode == "while":
            self._enter(instruction, dict(instruction.calls)["body"], operands[0])
            return operands[0]
        if opcode in ("conditional", "call"):
            for (kind, called), leaves in zip(instruction.calls, operands[-len(instruction.calls) :], strict=False):
                if kind != "to_apply" or opcode == "call":
                    self._enter(instruction, called, leaves)
        if opcode.endswith("-done"):
            return self._finished(instruction, operands[0])
        return self._made(instruction, operands)

    def _enter(self, instruction: Instruction, called: str, carried: Leaves) -> None:
        inside = _Walk(self.program, called, carried, {}).fullest()
        before = self.inner.get(instruction.name, [])
        self.inner[instruction.name] = max(before, inside, key=lambda held: sum(one.device_bytes for one in held))

    @staticmethod
    def _finished(instruction: Instruction, started: Leaves) -> Leaves:
        """The arrays of a `-start` that are its result: among its leaves those of the same shapes, from the last."""
        found: Leaves = []
        for shape in instruction.shapes:
            same = [leaf for leaf in started if leaf is not None and leaf.shape == shape and leaf not in found]
            own = [leaf for leaf in same if leaf.made_by.opcode.endswith("-start")]
            found.append((own or same or [None])[-1] if shape.space == 0 else None)
        return found

    def _made(self, instruction: Instruction, operands: list[Leaves]) -> Leaves:
        """New arrays, but for those that lie in an operand's memory."""
        shared = self._shared(instruction, operands)
        leaves: Leaves = []
        for index, shape in enumerate(instruction.shapes):
            place = shared.get(index)
            if place is not None:
                place.written_by.append((self.name, instruction))
                leaves.append(place)
            elif shape.space or not shape.bytes or instruction.opcode == "constant":
                leaves.append(None)
            elif instruction.opcode.endswith("-start") and (source := self._source(shape, operands, leaves)):
                leaves.append(source)
            else:
                buffer = _new(shape, instruction, self.name)
                self.own.append(buffer)
                leaves.append(buffer)
        return leaves

    @staticmethod
    def _source(shape: Shape, operands: list[Leaves], found: Leaves) -> Buffer | None:
        """The operand that a `-start` repeats among its results."""
        same = [leaf for leaves in operands for leaf in leaves if leaf is not None and leaf.shape == shape]
        return next((leaf for leaf in same if leaf not in found), None)

    def _shared(self, instruction: Instruction, operands: list[Leaves]) -> dict[int, Buffer]:
        """Which results (by number) lie in an operand's memory."""
        pairs = [(int(source), int(result) - len(operands)) for source, result in _ALIASES.findall(instruction.config)]
        if instruction.opcode == "dynamic-update-slice":
            pairs.append((0, 0))
        elif instruction.opcode == "fusion":
            pairs += self._updated_in_place(instruction)
        found: dict[int, Buffer] = {}
        for source, result in pairs:
            leaf = operands[source][0] if source < len(operands) and operands[source] else None
            if leaf is not None and 0 <= result < len(instruction.shapes) and instruction.shapes[result].space == 0:
                found.setdefault(result, leaf)
        return found

    def _updated_in_place(self, fusion: Instruction) -> list[tuple[int, int]]:
        """(operand, result) of a fusion whose result is an operand with a piece replaced."""
        inside = self.program.computations[dict(fusion.calls)["calls"]]
        results = root(inside)
        pairs: list[tuple[int, int]] = []
        for number, name in enumerate(results.operands if results.opcode == "tuple" else (results.name,)):
            update = self.program.plain(inside, name) if inside[name].opcode == "bitcast" else inside[name]
            if update.opcode == "dynamic-update-slice":
                target = inside[update.operands[0]]
                while target.opcode == "bitcast":
                    target = inside[target.operands[0]]
                if target.opcode == "parameter":
                    pairs.append((int(target.literal), number))
        return pairs
