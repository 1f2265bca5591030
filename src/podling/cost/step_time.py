"""The time of one step on a TPU, from the program that its compiler made.

Every instruction of the schedule takes the compiler's own estimate in cycles, times a calibrated factor, but never less
than its matrix products at peak and its bytes at full bandwidth; the floors alone where there is no estimate. Copies
and collectives that run beside the compute take what of them is not done when the schedule waits for them: `Lane` has
how much that is. Loops count their turns, a conditional its longer branch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from podling.chips import Chip
from podling.cost.calibration import calibration
from podling.cost.links import Links, join
from podling.cost.records import KINDS, Kind, OpTime, StepTime
from podling.hlo.access import hbm_bytes
from podling.hlo.collectives import Collective, find_collectives
from podling.hlo.matmuls import Matmul, find_matmuls
from podling.hlo.program import Program
from podling.hlo.text import Instruction
from podling.topology import Topology

KERNEL_EFFICIENCY = 0.5
"""Of the peak, that a custom kernel reaches: it has no estimate but the operations that it states."""
ON_LINKS = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")
COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def step_time(
    program: Program,
    chip: Chip,
    mesh: Mapping[str, int],
    topology: Topology | None = None,
    slices: int = 1,
    factor: float | None = None,
) -> StepTime:
    """Predict a step of a compiled TPU program.

    Args:
        program: of the TPU compiler, scheduled.
        chip: which it was compiled for.
        mesh: the axes and sizes that it was compiled under, in order.
        topology: of one slice; None for the usual one of so many chips.
        slices: joined by the data centre's network.
        factor: from the compiler's cycles over the clock to seconds; None for the calibrated one and its range.

    Raises:
        InputError: a mesh that does not go with the topology.
        ValueError: a chip that is no TPU.
    """
    if chip.platform != "tpu":
        raise ValueError(f"{chip.name} is no TPU")
    known = calibration(chip.name)
    schedule = _Schedule(program, chip, join(chip, mesh, topology, slices), known.factor if factor is None else factor)
    ops = sorted(schedule.run(program.entry, 1), key=lambda op: -op.step_s)
    parts: dict[Kind, float] = {kind: sum(op.step_s for op in ops if op.kind == kind) for kind in KINDS}
    total = sum(parts.values())
    span = (total * known.low, total * known.high) if factor is None else (total, total)
    words = known.words if factor is None else f"the compiler's cycles times {factor:g}"
    return StepTime(total, span, parts, "; ".join([words, *schedule.doubts()]), tuple(ops))


@dataclass
class Lane:
    """A way that transfers take one after another while the schedule goes on; in seconds of its full bandwidth."""

    asked: float = 0.0
    done: float = 0.0

    def add(self, seconds: float) -> float:
        """Take on a transfer; returns what `wait` wants to know."""
        self.asked = max(self.asked, self.done) + seconds
        return self.asked

    def go_on(self, seconds: float) -> None:
        """The schedule went on, and left the lane this much of the time."""
        self.done = min(self.asked, self.done + seconds)

    def wait(self, until: float) -> float:
        """Seconds until the transfer is through; they pass."""
        left = max(0.0, until - self.done)
        self.done += left
        return left


@dataclass
class _Lanes:
    """The lanes of one computation that runs step by step."""

    memory: Lane = field(default_factory=Lane)  # between HBM and VMEM
    links: dict[tuple[str, ...], Lane] = field(default_factory=dict)  # along the mesh axes that are crossed
    tickets: dict[str, float] = field(default_factory=dict)

    def go_on(self, seconds: float, memory_s: float = 0.0) -> None:
        """`memory_s` of the time the instruction itself kept the memory busy."""
        self.memory.go_on(max(0.0, seconds - memory_s))
        for lane in self.links.values():
            lane.go_on(seconds)

    def wait(self, lane: Lane, until: float) -> float:
        """While one lane is waited for, the others go on."""
        left = lane.wait(until)
        for other in (self.memory, *self.links.values()):
            if other is not lane:
                other.go_on(left)
        return left


class _Schedule:
    """A program's computations, run in the mind."""

    def __init__(self, program: Program, chip: Chip, links: Links, factor: float):
        self.program, self.chip, self.links, self.factor = program, chip, links, factor
        self.silent = 0
        self.matmuls: dict[tuple[str, str], list[Matmul]] = {}
        for one in find_matmuls(program):
            self.matmuls.setdefault((one.scheduled_in, one.instruction), []).append(one)
        self.starts: dict[tuple[str, str], list[Collective]] = {}
        self.ends: dict[tuple[str, str], list[Collective]] = {}
        for one in find_collectives(program, _over_slices(links)):
            self.starts.setdefault((one.scheduled_in, one.runs_in[0]), []).append(one)
            self.ends.setdefault((one.scheduled_in, one.runs_in[-1]), []).append(one)

    def doubts(self) -> list[str]:
        """What was not known and how it was counted, in words."""
        said = []
        if self.program.unknown_loops:
            said.append(f"loops of unknown length counted once: {', '.join(self.program.unknown_loops)}")
        if self.silent:
            said.append(f"{self.silent} custom kernels state no operations: counted by their bytes alone")
        return said

    def run(self, computation: str, times: int) -> list[OpTime]:
        """Its instructions' times, each `times` times."""
        lanes, ops = _Lanes(), []
        for name, instruction in self.program.computations[computation].items():
            found = self._inside(instruction, computation, times)
            if found is None:
                found = self._one(lanes, computation, name, instruction, times)
            elif times:
                lanes.go_on(sum(op.step_s for op in found) / times, self._memory_s(found) / times)
            ops += found
        return ops

    def _memory_s(self, ops: list[OpTime]) -> float:
        return sum(op.times * op.hbm_bytes for op in ops) / self.chip.hbm_bytes_per_s

    def _inside(self, instruction: Instruction, computation: str, times: int) -> list[OpTime] | None:
        """The times of what an instruction runs; None for one that is timed itself."""
        called = dict(instruction.calls)
        if instruction.opcode == "while":
            turns = self.program.trip_count(computation, instruction)
            turns = 1 if turns is None else turns
            return self.run(called["body"], times * turns) + self.run(called["condition"], times * (turns + 1))
        if instruction.opcode == "conditional":
            branches = [self.run(branch, times) for _, branch in instruction.calls]
            return max(branches, key=lambda ops: sum(op.step_s for op in ops))
        if instruction.opcode == "call":
            return self.run(called["to_apply"], times)
        return None

    def _one(self, lanes: _Lanes, computation: str, name: str, instruction: Instruction, times: int) -> list[OpTime]:
        ops = []
        moves = instruction.opcode in COPIES
        if not instruction.opcode.removesuffix("-start").startswith(ON_LINKS) and not moves:
            op = self._compute(computation, instruction, times)
            for one in self.starts.get((computation, name), ()):
                if one.asynchronous:
                    self._start(lanes, one)
            if op is not None:
                ops.append(op)
                lanes.go_on(op.step_s / max(times, 1), op.hbm_bytes / self.chip.hbm_bytes_per_s)
        elif moves:
            moved = hbm_bytes(self.program, computation, instruction)
            lanes.tickets[name] = lanes.memory.add(moved / self.chip.hbm_bytes_per_s)
        ops += self._collectives(lanes, computation, name, times)
        if instruction.opcode.endswith("-done") and instruction.operands[0] in lanes.tickets:
            ops.append(self._copied(lanes, computation, instruction, times))
        return ops

    def _start(self, lanes: _Lanes, one: Collective) -> None:
        lane = lanes.links.setdefault(one.axes, Lane())
        lanes.tickets[one.name] = lane.add(self.links.of(one))

    def _collectives(self, lanes: _Lanes, computation: str, name: str, times: int) -> list[OpTime]:
        """What begins here and what is waited for here."""
        for one in self.starts.get((computation, name), ()):
            if one.name not in lanes.tickets:
                self._start(lanes, one)
        ops = []
        for one in self.ends.get((computation, name), ()):
            waited = lanes.wait(lanes.links[one.axes], lanes.tickets.pop(one.name)) * times
            on_links = self.links.of(one) * times
            ops.append(
                OpTime(
                    one.name, one.computation, one.op_name, "collective", times, waited,
                    0.0 if one.asynchronous else on_links, None, 0, 0, on_links,
                )
            )  # fmt: skip
        return ops

    def _copied(self, lanes: _Lanes, computation: str, done: Instruction, times: int) -> OpTime:
        """What is waited for a copy between HBM and VMEM."""
        start = self.program.computations[computation][done.operands[0]]
        waited = lanes.wait(lanes.memory, lanes.tickets.pop(start.name)) * times
        moved = hbm_bytes(self.program, computation, start)
        return OpTime(done.name, computation, start.op_name, "memory", times, waited, 0.0, None, 0, moved)

    def _compute(self, computation: str, instruction: Instruction, times: int) -> OpTime | None:
        """The time of a plain instruction; None where it takes none."""
        matmuls = self.matmuls.get((computation, instruction.name), [])
        flops = sum(one.flops for one in matmuls)
        at_peak = sum(one.flops * one.passes for one in matmuls) / self.chip.peak_flops["bfloat16"]
        floor = at_peak
        if 'custom_call_target="tpu_custom_call"' in instruction.attributes:
            flops = self._stated(instruction)
            floor = flops / self.chip.peak_flops["bfloat16"]
            at_peak = floor / KERNEL_EFFICIENCY
        moved = hbm_bytes(self.program, computation, instruction)
        in_memory = moved / self.chip.hbm_bytes_per_s
        cycles = instruction.estimated_cycles
        estimate = (cycles or 0) / self.chip.clock_hz * self.factor
        took = max(estimate, at_peak, in_memory)
        if not took:
            return None
        return OpTime(
            instruction.name, computation, instruction.op_name, _kind(took, at_peak, in_memory), times,
            took * times, max(floor, in_memory) * times, cycles, flops, moved,
        )  # fmt: skip

    def _stated(self, kernel: Instruction) -> int:
        stated = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', kernel.config)
        self.silent += stated is None
        return int(stated[1]) if stated else 0


def _kind(took: float, at_peak: float, in_memory: float) -> Kind:
    """Whichever bound wins. Where it is the compiler's estimate: the floor that makes up half of it, else compute."""
    if max(at_peak, in_memory) < took / 2:
        return "compute"
    return "matmul" if at_peak >= in_memory else "memory"


def _over_slices(links: Links) -> dict[str, int]:
    """The whole mesh."""
    sizes = dict(links.sizes)
    outer = next(iter(sizes))
    sizes[outer] *= links.slices
    return sizes
