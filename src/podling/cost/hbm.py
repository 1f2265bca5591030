"""What a compiled step holds in device memory, by category and with the names of the largest arrays.

The total is the compiler's own (`memory_analysis`). What it is made of is read from the scheduled program at the moment
at which most is held; that moment is the compiler's to within 4% (its `peak_memory_in_bytes`, which is not used here).
What the arrays leave of the total are gaps: the compiler packs arrays of different life into one heap.
"""

from dataclasses import dataclass
from typing import Any

from podling.cost.liveness import Buffer, fullest
from podling.cost.naming import Names
from podling.cost.records import CATEGORIES, Hbm, Tensor
from podling.hlo.program import Program

GAPS = "gaps between arrays"
SHOWN = 12


@dataclass(frozen=True)
class MemoryStats:
    """`compiled.memory_analysis()`, of one device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


def memory_stats(compiled: Any) -> MemoryStats:
    """The figures of a `jax.stages.Compiled`."""
    found = compiled.memory_analysis()
    return MemoryStats(
        argument_bytes=found.argument_size_in_bytes,
        output_bytes=found.output_size_in_bytes,
        alias_bytes=found.alias_size_in_bytes,
        temp_bytes=found.temp_size_in_bytes,
        code_bytes=found.generated_code_size_in_bytes,
    )


def hbm_of(program: Program, stats: MemoryStats, limit_bytes: int) -> Hbm:
    """The memory of one device.

    Args:
        program: compiled and scheduled, of `train.lowering.lower_step`.
        stats: the compiler's figures for it.
        limit_bytes: what one device has.
    """
    names = Names(program)
    tensors = [_tensor(names, buffer) for buffer in fullest(program).buffers if buffer.device_bytes]
    tensors.append(Tensor("instructions", "program", "", stats.code_bytes))
    by_category: dict[str, int] = {category: 0 for category in CATEGORIES}
    for tensor in tensors:
        by_category[tensor.category] += tensor.device_bytes
    gaps = stats.total_bytes - sum(by_category.values())
    by_category["temporary"] += gaps
    if by_category["temporary"] < 0:  # the moment was made out to be fuller than it is
        by_category[max(by_category, key=lambda name: by_category[name])] += by_category["temporary"]
        by_category["temporary"] = 0
    if gaps > 0:
        tensors.append(Tensor(GAPS, "temporary", "", gaps))
    largest = sorted(_merged(tensors), key=lambda tensor: -tensor.device_bytes)[:SHOWN]
    return Hbm(stats.total_bytes, limit_bytes, by_category, tuple(largest), "compiler")


def _tensor(names: Names, buffer: Buffer) -> Tensor:
    category, name = names.of(buffer)
    return Tensor(name, category, str(buffer.shape), buffer.device_bytes)


def _merged(tensors: list[Tensor]) -> list[Tensor]:
    """Arrays of one name and shape as one, with their number."""
    groups: dict[tuple[str, str, str], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.name, tensor.category, tensor.shape), []).append(tensor)
    return [
        Tensor(
            f"{len(group)} x {name}" if len(group) > 1 else name, category, shape, sum(t.device_bytes for t in group)
        )
        for (name, category, shape), group in groups.items()
    ]
