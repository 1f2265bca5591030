"""How one optimizer step's tokens are cut: rows, micro-batches, accumulation."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podling.config import Config
from podling.cost.records import Layout
from podling.cost.shares import share
from podling.cost.step_bytes import needed_bytes
from podling.errors import raise_if
from podling.model.fit import batch_problems
from podling.model.form import Form
from podling.parallel.axes import batch_ways, mesh_text

USABLE = 0.75
"""Share of a device's memory that state and activations may take; the rest is for what the estimate does not see."""


@dataclass(frozen=True)
class BatchPlan:
    """`rows` sequences of `context` tokens, as `micro_steps` forward passes of `micro_batch` rows over all devices."""

    context: int
    rows: int
    micro_batch: int
    micro_steps: int

    @property
    def tokens(self) -> int:
        return self.rows * self.context

    def __str__(self) -> str:
        many = self.micro_steps > 1
        cut = f"{self.micro_steps} micro-batches of {_rows_text(self.micro_batch)}" if many else "in one piece"
        return f"{self.tokens:,} tokens a step: {_rows_text(self.rows)} of {self.context}, {cut}"


def _rows_text(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def plan_batch(
    config: Config, mesh_sizes: Mapping[str, int], itemsize: int, device_bytes: int, most_tokens: int | None = None
) -> BatchPlan:
    """Derive micro-batch and accumulation from `batch_tokens`.

    Args:
        config: resolved.
        mesh_sizes: devices on each mesh axis: rows are split over data and fsdp, what one needs over tensor, the state
            over fsdp and tensor.
        itemsize: bytes of the compute dtype.
        device_bytes: memory of one device.
        most_tokens: of a derived micro-batch, on each device; None: as many as fit.

    Raises:
        InputError: rows, or the micro-batch that was asked for, do not divide as they must.
    """
    ways = batch_ways(mesh_sizes)
    raise_if(batch_problems(config, mesh_sizes))
    context, rows, micro = config.model.context, _rows(config), config.train.micro_batch
    if not micro:
        sizes = [size for size in range(ways, rows + 1, ways) if rows % size == 0]
        if most_tokens is not None:
            sizes = [size for size in sizes if size * context <= most_tokens * ways] or sizes[:1]
        usable = USABLE * device_bytes
        fitting = [size for size in sizes if micro_batch_bytes(config, mesh_sizes, size, itemsize) <= usable]
        micro = max(fitting, default=min(sizes))
    return BatchPlan(context=context, rows=rows, micro_batch=micro, micro_steps=rows // micro)


def _rows(config: Config) -> int:
    return config.train.batch_tokens // config.model.context


def micro_batch_bytes(config: Config, mesh_sizes: Mapping[str, int], micro_batch: int, itemsize: int) -> int:
    """Estimated bytes that each device needs for a step in micro-batches of this many rows over all devices."""
    form = Form.of(config.train)
    layout = Layout(mesh_text(mesh_sizes), micro_batch, _rows(config) // micro_batch, form.remat, form.loss_chunk)
    return needed_bytes(share(config, layout, itemsize))


def device_memory_bytes(devices: Sequence[Any]) -> int:
    """Memory of each device: what its runtime reports, or for CPUs an equal share of half of what the machine has."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return machine_memory_bytes() // (2 * len(devices))


def machine_memory_bytes() -> int:
    """All memory of this machine, whoever uses it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
