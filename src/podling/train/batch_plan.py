"""How one optimizer step's tokens are cut: rows, micro-batches, accumulation."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podling.config import Config, ModelConfig
from podling.errors import raise_if
from podling.model.fit import batch_problems
from podling.parallel.axes import batch_ways

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


def plan_batch(config: Config, mesh_sizes: Mapping[str, int], itemsize: int, device_bytes: int) -> BatchPlan:
    """Derive micro-batch and accumulation from `batch_tokens`.

    Args:
        config: resolved.
        mesh_sizes: devices on each mesh axis: rows are split over data and fsdp, what one needs over tensor, the state
            over fsdp and tensor.
        itemsize: bytes of the compute dtype.
        device_bytes: memory of one device.

    Raises:
        InputError: rows, or the micro-batch that was asked for, do not divide as they must.
    """
    ways = batch_ways(mesh_sizes)
    raise_if(batch_problems(config, mesh_sizes))
    context, rows, micro = config.model.context, _rows(config), config.train.micro_batch
    if not micro:
        weights = _weights(config.model) / (mesh_sizes["fsdp"] * mesh_sizes["tensor"])
        # Everything a row needs is split over tensor: the residual stream, heads, mlp and vocabulary. (124M, 16 rows a
        # device over tensor=4, dots: 1.8 GiB by this estimate, 1.6 by the TPU compiler for v5e:2x4.)
        row = row_bytes(config, itemsize) / mesh_sizes["tensor"]

        def room(*, accumulates: bool) -> float:
            """Rows for which a device has memory beside what it holds of the parameters."""
            held = bytes_per_parameter(itemsize, accumulates=accumulates) * weights
            return (USABLE * device_bytes - held) / row

        fits = max(room(accumulates=True), 1) * ways
        sizes = [size for size in range(ways, rows + 1, ways) if rows % size == 0 and size <= fits]
        micro = rows if room(accumulates=False) * ways >= rows else max(sizes)
    return BatchPlan(context=context, rows=rows, micro_batch=micro, micro_steps=rows // micro)


def _rows(config: Config) -> int:
    return config.train.batch_tokens // config.model.context


def bytes_per_parameter(itemsize: int, *, accumulates: bool) -> int:
    """Bytes that a step holds for a parameter: 16 for it, its two moments and its gradient in float32, and the copies.

    These are the weights in the compute dtype, which the TPU compiler casts once for all layers, and where gradients
    are accumulated a micro-batch's own before they are added. (124M on a v5e chip, data=8: its program has every
    kernel in bfloat16, and two micro-batches for one take 859 MiB more, of which the second gradients are 475.)

    Args:
        itemsize: bytes of the compute dtype.
        accumulates: whether the batch is cut into micro-batches.
    """
    return 16 + (4 if accumulates else 0) + (itemsize if itemsize < 4 else 0)


def row_bytes(config: Config, itemsize: int) -> int:
    """Estimated bytes one sequence needs for its activations, kept for the backward pass, and its logits."""
    model, train = config.model, config.train
    residual = model.context * model.embed * itemsize
    attention = model.context**2 * model.heads * (8 + itemsize)  # float32 scores, their softmax, and its cast
    layer = 10 * residual + 3 * model.context * model.mlp * itemsize + attention
    # dots keeps q, k, v, the two projections and the MLP's hidden layer. For the 124M model on a v5e chip, 8 rows in
    # bfloat16 and loss chunks of 256, the TPU compiler asks for 15.1 GB without remat (here: 17.9) and 4.0 GB (3.9).
    dots = 5 * residual + model.context * model.mlp * itemsize
    kept = {"none": layer, "dots": dots, "full": residual}[train.remat]
    positions = train.loss_chunk or model.context
    logits = 3 * positions * max(model.vocab_size, 1) * 4
    return model.layers * kept + layer + logits


def device_memory_bytes(devices: Sequence[Any]) -> int:
    """Memory of each device: what its runtime reports, or for CPUs an equal share of half of what the machine has."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * len(devices))


def _weights(model: ModelConfig) -> int:
    return model.layers * (4 * model.embed**2 + 2 * model.embed * model.mlp) + model.vocab_size * model.embed
