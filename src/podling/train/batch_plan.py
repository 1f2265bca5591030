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
        cut = f"{self.micro_steps} micro-batches of {self.micro_batch} rows" if self.micro_steps > 1 else "in one piece"
        return f"{self.tokens:,} tokens a step: {self.rows} rows of {self.context}, {cut}"


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
        # What parameters, moments and gradients leave.
        state_bytes = 16 * _weights(config.model) / (mesh_sizes["fsdp"] * mesh_sizes["tensor"])
        # Everything a row needs is split over tensor: the residual stream, heads, mlp and vocabulary. (124M, 16 rows a
        # device over tensor=4, dots: 1.8 GiB by this estimate, 1.6 by the TPU compiler for v5e:2x4.)
        row = row_bytes(config, itemsize) / mesh_sizes["tensor"]
        fits = max((USABLE * device_bytes - state_bytes) / row, 1) * ways
        sizes = [size for size in range(ways, rows + 1, ways) if rows % size == 0]
        micro = max(size for size in sizes if size <= max(fits, ways))
    return BatchPlan(context=context, rows=rows, micro_batch=micro, micro_steps=rows // micro)


def _rows(config: Config) -> int:
    return config.train.batch_tokens // config.model.context


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
