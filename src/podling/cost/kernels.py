"""Cycles of our own TPU kernels, as the compiler schedules them: the program that it gives back says nothing of them.

A TPU runs one wide instruction a cycle, in the order in which the compiler lined them up, so their number is the
kernel's time, stalls and waits for memory left out. `bench/kernel_cycles.py` makes the compiler write its schedules
down and prints this table. No JAX.
"""

import re
from dataclasses import dataclass

from podling.hlo.text import Computation, Instruction


@dataclass(frozen=True)
class Scheduled:
    """Both passes on one chip."""

    chip: str
    length: int  # tokens of a sequence
    group: int  # heads that share 128 lanes
    forward: int  # cycles of one sequence and one group
    backward: int


SCHEDULED = (
    Scheduled("v5e", 128, 2, 378, 593),
    Scheduled("v5e", 256, 2, 656, 1088),
    Scheduled("v5e", 512, 2, 1580, 2596),
    Scheduled("v5e", 1024, 2, 4677, 8400),
    Scheduled("v5e", 2048, 2, 15590, 30754),
    Scheduled("v6e", 128, 2, 328, 583),
    Scheduled("v6e", 256, 2, 603, 910),
    Scheduled("v6e", 512, 2, 1266, 1959),
    Scheduled("v6e", 1024, 2, 3252, 5777),
    Scheduled("v6e", 2048, 2, 10154, 19503),
)


def scheduled_cycles(chip: str, here: Computation, kernel: Instruction) -> int | None:
    """Of all programs of a kernel; None for one that is not ours, or of sizes that were never scheduled.

    Args:
        chip: its name.
        here: the computation that the kernel stands in.
        kernel: a custom call.
    """
    found = re.search(r"fused_attention_(forward|backward)", f"{kernel.name} {kernel.op_name}")
    # The sums of the softmax are [sequences, groups, heads of a group, tokens]: the only array of four axes.
    arrays = [shape.dims for operand in kernel.operands for shape in here[operand].shapes]
    arrays += [shape.dims for shape in kernel.shapes]
    sums = next((dims for dims in arrays if len(dims) == 4), None)
    if not found or sums is None:
        return None
    sequences, groups, group, length = sums
    known = next((one for one in SCHEDULED if (one.chip, one.length, one.group) == (chip, length, group)), None)
    if known is None:
        return None
    return sequences * groups * (known.forward if found[1] == "forward" else known.backward)
