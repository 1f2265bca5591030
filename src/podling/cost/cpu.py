"""The time of a compiled step on this CPU: its instructions, one by one, at the speeds measured for such work."""

from collections.abc import Iterator, Mapping

from podling.cost.cpu_peaks import CpuPeaks
from podling.cost.cpu_work import in_parallel, product, turn, written
from podling.cost.records import KINDS, Kind, OpTime, StepTime
from podling.hlo.access import hbm_bytes
from podling.hlo.memory import PLUMBING
from podling.hlo.program import Program
from podling.hlo.text import Computation, Instruction

FREE = (*PLUMBING, "parameter", "constant", "after-all", "partition-id", "replica-id")
REUSED_BYTES = 2**25
"""glibc maps an allocation of this size or more anew each time, and gives it back: every page is then fresh."""
SEEN_ERROR = 0.15
"""Most that predicted and measured have differed by on a quiet machine; see bench/cpu_prediction.py."""
DISTURBED = 2.0
"""A step may take so many times more or less where other work disturbs the measuring, and may come or go after it."""


def cpu_step_time(
    program: Program, peaks: CpuPeaks, mesh: Mapping[str, int] | None = None, temp_bytes: int = 0
) -> StepTime:
    """Add up a step's instructions.

    Args:
        program: the optimised program of a CPU.
        peaks: measured on it.
        mesh: of one device; a CPU cut into several is not foretold.
        temp_bytes: what the program allocates for each run, as its memory analysis says.

    Raises:
        ValueError: the mesh is of several devices.
    """
    if any(size > 1 for size in (mesh or {}).values()):
        raise ValueError(f"a CPU as several devices: {dict(mesh or {})}")
    ops = sorted(_ops(program, peaks), key=lambda op: -op.step_s)
    fresh_s = temp_bytes * peaks.fresh_s_per_byte if temp_bytes >= REUSED_BYTES else 0.0
    parts: dict[Kind, float] = {kind: sum(op.step_s for op in ops if op.kind == kind) for kind in KINDS}
    parts["memory"] += fresh_s
    step_s = sum(parts.values())
    if disturbed := peaks.disturbed:
        range_s, sure = (step_s / DISTURBED, step_s * DISTURBED), f"while {disturbed}: half or twice is possible"
    else:
        range_s = (step_s * (1 - SEEN_ERROR), step_s * (1 + SEEN_ERROR))
        sure = f"seen to come within {SEEN_ERROR:.0%} on a quiet machine"
    words = f"from speeds of matrix products and memory measured here, {sure}"
    return StepTime(step_s, range_s, parts, words, tuple(ops))


def _ops(program: Program, peaks: CpuPeaks) -> Iterator[OpTime]:
    for name, here in program.computations.items():
        if program.scheduled_in(name) != name or not _runs(program, name):
            continue
        for instruction in here.values():
            if instruction.opcode not in FREE:
                yield _op(program, name, instruction, peaks)


def _runs(program: Program, name: str) -> bool:
    """Whether a computation is a schedule, and not what a reduction does with two elements."""
    runs = ("while", "conditional", "call", "async-start")
    return name == program.entry or any(call.instruction.opcode in runs for call in program.callers[name])


def _op(program: Program, name: str, instruction: Instruction, peaks: CpuPeaks) -> OpTime:
    fused, times = instruction.opcode == "fusion", program.times[name]
    within = program.computations[instruction.calls[0][1]] if fused else {instruction.name: instruction}
    here = within if fused else program.computations[name]
    dots = [product(here, found) for found in within.values() if found.opcode == "dot"]
    moved = hbm_bytes(program, name, instruction)
    if dots:
        kind, once_s = "matmul", sum(map(peaks.multiply_s, dots))
    else:
        memory_s, compute_s = _memory_s(instruction, within, moved, peaks), _compute_s(within, peaks)
        kind, once_s = "compute" if compute_s > memory_s else "memory", max(memory_s, compute_s)
    if not in_parallel(instruction) and _nobody_waits(program, name, instruction):
        once_s /= peaks.threads
    once_s += peaks.call_s
    return OpTime(
        name=instruction.name,
        computation=name,
        op_name=instruction.op_name,
        kind=kind,
        times=times,
        step_s=once_s * times,
        floor_s=once_s * times,
        cycles=None,
        flops=sum(dot.flops for dot in dots),
        hbm_bytes=moved,
    )


def _nobody_waits(program: Program, name: str, instruction: Instruction) -> bool:
    """Whether a result is only kept for later: what follows goes on beside it, on the other threads."""
    readers = program.users[name].get(instruction.name, [])
    return bool(readers) and all(reader.root and reader.opcode == "tuple" for reader in readers)


def _memory_s(instruction: Instruction, within: Computation, moved_bytes: int, peaks: CpuPeaks) -> float:
    """A pass over what is read and written, or a transposition, whichever takes longer."""
    parallel = in_parallel(instruction)
    across = turn(within, parallel=parallel) if instruction.opcode == "fusion" else None
    turned_s = peaks.turned_s(across) * written(within) if across else 0.0
    return max(peaks.pass_s(moved_bytes, parallel=parallel), turned_s)


def _compute_s(within: Computation, peaks: CpuPeaks) -> float:
    costs = {"exponential": peaks.exp_s, "tanh": peaks.tanh_s}
    return sum(costs.get(each.opcode, 0.0) * each.shapes[0].size for each in within.values() if each.shapes)
