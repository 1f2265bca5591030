"""The time of one step on a TPU, from the program that its compiler made.

Every instruction of the schedule takes the compiler's own estimate in cycles, times a calibrated factor, but never less
than its matrix products at peak and its bytes at full bandwidth; the floors alone where there is no estimate. Copies
and collectives that run beside the compute take what of them is not done when the schedule waits for them (`lanes`).
Loops count their turns, a conditional its longer branch.
"""

import math
import re
from collections.abc import Mapping

from podling.chips import Chip
from podling.cost.calibration import calibration
from podling.cost.kernels import scheduled_cycles
from podling.cost.lanes import Lanes
from podling.cost.links import Links, join
from podling.cost.records import KINDS, Kind, OpTime, StepTime
from podling.cost.slices import BETWEEN, exchange_of
from podling.hlo.access import hbm_bytes
from podling.hlo.collectives import Collective, find_collectives
from podling.hlo.matmuls import Matmul, find_matmuls
from podling.hlo.program import Program
from podling.hlo.text import Instruction
from podling.topology import Topology

KERNEL_EFFICIENCY = 0.5
"""Of the peak, that a custom kernel reaches at most: it has no estimate but the operations that it states. One whose
schedule is known (`cost.kernels`) takes no less than that either."""
ON_LINKS = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")
ON_THE_HOST = ("send", "send-done", "recv", "recv-done")
COPIES = ("copy-start", "slice-start", "async-start")


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
    used = known.factor if factor is None else factor
    links = join(chip, mesh, topology, slices)
    if program.partitions < math.prod(mesh.values()):  # it is the program of one slice
        mesh, links = links.sizes, join(chip, links.sizes, topology)
    schedule = _Schedule(program, chip, mesh, links, used, slices)
    ops = sorted(schedule.run(program.entry, 1), key=lambda op: -op.step_s)
    parts: dict[Kind, float] = {kind: sum(op.step_s for op in ops if op.kind == kind) for kind in KINDS}
    total = sum(parts.values())
    span = (total * known.low, total * known.high) if factor is None else (total, total)
    words = known.words if factor is None else f"the compiler's cycles times {factor:g}"
    return StepTime(total, span, parts, "; ".join([words, *schedule.doubts()]), tuple(ops))


class _Schedule:
    """A program's computations, run in the mind."""

    def __init__(self, program: Program, chip: Chip, mesh: Mapping[str, int], links: Links, factor: float, slices: int):
        self.program, self.chip, self.links, self.factor, self.slices = program, chip, links, factor, slices
        self.silent = 0  # custom kernels that state no operations
        self.unknown_loops: list[str] = []
        self.matmuls: dict[tuple[str, str], list[Matmul]] = {}
        for one in find_matmuls(program):
            self.matmuls.setdefault((one.scheduled_in, one.instruction), []).append(one)
        self.starts: dict[tuple[str, str], list[Collective]] = {}
        self.ends: dict[tuple[str, str], list[Collective]] = {}
        for one in find_collectives(program, mesh):
            self.starts.setdefault((one.scheduled_in, one.runs_in[0]), []).append(one)
            self.ends.setdefault((one.scheduled_in, one.runs_in[-1]), []).append(one)

    def doubts(self) -> list[str]:
        """What was not known and how it was counted, in words."""
        said = []
        if self.unknown_loops:
            said.append(f"loops of unknown length counted once: {', '.join(self.unknown_loops)}")
        if self.silent:
            said.append(f"{self.silent} custom kernels state no operations: counted by their bytes alone")
        if self.slices > 1:
            said.append("what slices exchange is counted by its bytes over the published bandwidth, never measured")
        return said

    def run(self, computation: str, times: int) -> list[OpTime]:
        """Its instructions' times, each `times` times."""
        lanes, ops = Lanes(), []
        for instruction in self.program.computations[computation].values():
            inside = self._inside(computation, instruction, times)
            if inside is None:
                ops += self._one(lanes, computation, instruction, times)
            elif times:
                busy = sum(op.times * op.hbm_bytes for op in inside) / self.chip.hbm_bytes_per_s
                lanes.go_on(sum(op.step_s for op in inside) / times, busy / times)
                ops += inside
        return ops

    def _inside(self, computation: str, instruction: Instruction, times: int) -> list[OpTime] | None:
        """The times of what an instruction runs; None for one that is timed itself."""
        called = dict(instruction.calls)
        if instruction.opcode == "while":
            turns = self.program.trip_count(computation, instruction)
            if turns is None:
                self.unknown_loops.append(instruction.name)
                turns = 1
            return self.run(called["body"], times * turns) + self.run(called["condition"], times * (turns + 1))
        if instruction.opcode == "conditional":
            branches = [self.run(branch, times) for _, branch in instruction.calls]
            return max(branches, key=lambda ops: sum(op.step_s for op in ops))
        if instruction.opcode == "call":
            return self.run(called["to_apply"], times)
        return None

    def _one(self, lanes: Lanes, computation: str, instruction: Instruction, times: int) -> list[OpTime]:
        name, opcode = instruction.name, instruction.opcode
        if opcode in ON_THE_HOST:
            return self._exchanged(lanes, computation, instruction, times)
        begins, ends = (at.get((computation, name), []) for at in (self.starts, self.ends))
        for one in begins:
            if one.asynchronous:
                lanes.send(one.name, one.axes, self.links.of(one))
        ops = []
        if opcode in COPIES and not begins:
            lanes.copy(name, hbm_bytes(self.program, computation, instruction) / self.chip.hbm_bytes_per_s)
        elif opcode.endswith("-done") and not ends and instruction.operands[0] in lanes.tickets:
            ops.append(self._copied(lanes, computation, instruction, times))
        elif not opcode.startswith(ON_LINKS) and opcode != "async-start":
            op = self._compute(computation, instruction, times)
            if op is not None:
                ops.append(op)
                lanes.go_on(op.step_s / max(times, 1), op.hbm_bytes / self.chip.hbm_bytes_per_s)
        for one in begins:
            if not one.asynchronous:  # it runs after what is fused with it
                lanes.send(one.name, one.axes, self.links.of(one))
        return ops + [self._collected(lanes, one, times) for one in ends]

    def _exchanged(self, lanes: Lanes, computation: str, instruction: Instruction, times: int) -> list[OpTime]:
        """Begin an exchange between slices, or wait for it."""
        one = exchange_of(self.program, computation, instruction)
        if one is None:
            return []
        seconds = one.seconds(self.chip, self.slices)
        if instruction.opcode == "send":
            lanes.send(one.name, BETWEEN, seconds)
            return []
        waited = lanes.wait(one.name, BETWEEN) * times if one.name in lanes.tickets else seconds * times
        words = f"between slices: {one.kind.lower().replace('_', '-')}"
        return [
            OpTime(instruction.name, computation, words, "collective", times, waited, 0.0, None, 0, 0, seconds * times)
        ]

    def _collected(self, lanes: Lanes, one: Collective, times: int) -> OpTime:
        """What is waited for a collective."""
        waited, on_links = lanes.wait(one.name, one.axes) * times, self.links.of(one) * times
        floor = 0.0 if one.asynchronous else on_links
        return OpTime(
            one.name, one.computation, one.op_name, "collective", times, waited, floor, None, 0, 0, on_links
        )  # fmt: skip

    def _copied(self, lanes: Lanes, computation: str, done: Instruction, times: int) -> OpTime:
        """What is waited for a copy between HBM and VMEM."""
        start = self.program.computations[computation][done.operands[0]]
        waited, moved = lanes.wait(start.name) * times, hbm_bytes(self.program, computation, start)
        return OpTime(done.name, computation, start.op_name, "memory", times, waited, 0.0, None, 0, moved)

    def _compute(self, computation: str, instruction: Instruction, times: int) -> OpTime | None:
        """The time of a plain instruction; None where it takes none."""
        matmuls = self.matmuls.get((computation, instruction.name), [])
        flops = sum(one.flops for one in matmuls)
        at_peak = sum(one.flops * one.passes for one in matmuls) / self.chip.peak_flops["bfloat16"]
        floor, scheduled = at_peak, None
        if 'custom_call_target="tpu_custom_call"' in instruction.attributes:
            flops = self._stated(instruction)
            floor = flops / self.chip.peak_flops["bfloat16"]
            at_peak = floor / KERNEL_EFFICIENCY
            scheduled = scheduled_cycles(self.chip.name, self.program.computations[computation], instruction)
        moved = hbm_bytes(self.program, computation, instruction)
        in_memory = moved / self.chip.hbm_bytes_per_s
        cycles, factor = instruction.estimated_cycles, self.factor
        if scheduled is not None:  # no estimate: the kernel's very instructions
            cycles, factor = scheduled, 1.0
        estimate = (cycles or 0) / self.chip.clock_hz * factor
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
