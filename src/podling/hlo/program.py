"""A compiled program: who calls what, how often each loop turns, and so how often each instruction runs."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from podling.hlo.text import Computation, Instruction, parse, root

SAME_VALUE = ("bitcast", "copy", "convert", "reshape", "transpose", "copy-start", "copy-done", "opt-barrier")
"""Opcodes whose result is their operand in other clothes."""


@dataclass(frozen=True)
class Call:
    """An instruction that runs a computation."""

    computation: str  # the one that the instruction is in
    instruction: Instruction
    attribute: str  # calls, to_apply, body, condition, ...


@dataclass(frozen=True)
class Program:
    """Computations by name. Counts are per run of the program on one device."""

    computations: dict[str, Computation]
    entry: str
    partitions: int = 1
    unknown_loops: list[str] = field(default_factory=list)
    """While instructions whose number of turns the text does not tell; they count once."""

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Every instruction with the name of its computation."""
        for name, computation in self.computations.items():
            for instruction in computation.values():
                yield name, instruction

    @cached_property
    def callers(self) -> dict[str, list[Call]]:
        """Who runs each computation."""
        found: dict[str, list[Call]] = {name: [] for name in self.computations}
        for computation, instruction in self.instructions():
            for attribute, called in instruction.calls:
                if called in found:
                    found[called].append(Call(computation, instruction, attribute))
        return found

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs; loops within loops multiply, every branch of a conditional counts."""
        known = {self.entry: 1}

        def count(name: str) -> int:
            if name not in known:
                known[name] = sum(count(call.computation) * self._turns(call) for call in self.callers[name])
            return known[name]

        return {name: count(name) for name in self.computations}

    @cached_property
    def users(self) -> dict[str, dict[str, list[Instruction]]]:
        """Within each computation, the instructions that read each instruction."""
        found: dict[str, dict[str, list[Instruction]]] = {name: {} for name in self.computations}
        for name, instruction in self.instructions():
            for operand in dict.fromkeys(instruction.operands):
                found[name].setdefault(operand, []).append(instruction)
        return found

    def scheduled_in(self, computation: str) -> str:
        """The computation that runs step by step around this one: itself, unless it is the inside of a fusion."""
        return self.scheduled_as(computation, "")[0]

    def scheduled_as(self, computation: str, name: str) -> tuple[str, str]:
        """Where an instruction's time is spent: the computation that runs step by step, and the instruction there."""
        for call in self.callers[computation]:
            if call.instruction.opcode == "fusion" or call.instruction.opcode.startswith("async-"):
                return self.scheduled_as(call.computation, call.instruction.name)
        return computation, name

    def _turns(self, call: Call) -> int:
        if call.attribute not in ("body", "condition"):
            return 1
        turns = self.trip_count(call.computation, call.instruction)
        if turns is None:
            if call.instruction.name not in self.unknown_loops:
                self.unknown_loops.append(call.instruction.name)
            return 1
        return turns + (call.attribute == "condition")

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """How often a while loop's body runs; None where that is decided at run time.

        The CPU compiler writes it down; the TPU compiler does not, and there it is read from the counter's first
        value, its step and the bound in the condition.
        """
        written = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.config)
        if written:
            return int(written[1])
        called = dict(loop.calls)
        condition, body = self.computations[called["condition"]], self.computations[called["body"]]

        def initial(index: int) -> int | None:
            start = self.computations[computation]
            carried = start[loop.operands[0]]
            return self._integer(start, carried.operands[index]) if carried.opcode == "tuple" else None

        test, where, outside = self._compare(condition, initial)
        if test is None or len(test.operands) != 2:
            return None
        for counter, bound, direction in ((0, 1, "LT"), (1, 0, "GT")):
            index = self._carried(condition, where, test.operands[counter])
            first = None if index is None else initial(index)
            last = self._integer(where, test.operands[bound], outside)
            step = None if index is None else self._step(body, index)
            if test.attribute("direction") == direction and None not in (first, last, step):
                assert first is not None and last is not None and step
                return max(0, -(-(last - first) // step))
        return None

    def _compare(
        self, condition: Computation, initial: Callable[[int], int | None]
    ) -> tuple[Instruction | None, Computation, Callable[[int], int | None]]:
        """The comparison that ends a loop, where it stands (perhaps inside a fusion), and what its arguments are."""
        test = root(condition)
        if test.opcode == "compare":
            return test, condition, initial
        if test.opcode != "fusion":
            return None, condition, initial
        inside = self.computations[test.calls[0][1]]
        inner = root(inside)
        return (
            inner if inner.opcode == "compare" else None,
            inside,
            lambda index: self._integer(condition, test.operands[index], initial),
        )

    def _carried(self, condition: Computation, where: Computation, name: str) -> int | None:
        """Which element of the loop's state a value is."""
        value = self.plain(where, name)
        if value.opcode == "parameter" and where is not condition:  # inside a fusion: its operand says which
            value = self.plain(condition, root(condition).operands[int(value.literal)])
        return int(value.attribute("index")) if value.opcode == "get-tuple-element" else None

    def _step(self, body: Computation, index: int) -> int | None:
        after = root(body)
        if after.opcode != "tuple":
            return None
        value = self.plain(body, after.operands[index])
        where, outside = body, None
        if value.opcode == "fusion":
            where, fusion = self.computations[value.calls[0][1]], value
            value = root(where)
            outside = lambda number: self._integer(body, fusion.operands[number])  # noqa: E731
        if value.opcode != "add":
            return None
        steps = [self._integer(where, operand, outside) for operand in value.operands]
        return next((step for step in steps if step), None)

    def _integer(
        self, computation: Computation, name: str, argument: Callable[[int], int | None] | None = None
    ) -> int | None:
        """The value of an instruction that is a constant, or an argument whose value the caller knows."""
        value = self.plain(computation, name)
        if value.opcode == "constant" and re.fullmatch(r"-?\d+", value.literal):
            return int(value.literal)
        if argument and value.opcode == "parameter":
            return argument(int(value.literal))
        if argument and value.opcode == "get-tuple-element":
            return argument(int(value.attribute("index")))
        return None

    @staticmethod
    def plain(computation: Computation, name: str) -> Instruction:
        """The instruction behind copies and bitcasts."""
        value = computation[name]
        while value.opcode in SAME_VALUE and value.operands:
            value = computation[value.operands[0]]
        return value


def read_program(text: str) -> Program:
    """Read `compiled.as_text()`.

    Raises:
        RunError: text that is not optimised HLO.
    """
    computations, entry = parse(text)
    partitions = re.search(r"\bnum_partitions=(\d+)", text.partition("\n")[0])
    return Program(computations, entry, int(partitions[1]) if partitions else 1)
