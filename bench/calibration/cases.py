"""The programs that were measured in public: for each, what gives our stand-in and where it ran."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gpt2_notebook
import maxtext
import modded_nanogpt
import tpuchat
from jax.sharding import Mesh

Step = tuple[Any, Any, Any, Any]  # the step itself, and the shapes of parameters, moments and batch


@dataclass(frozen=True)
class Case:
    """One measured program."""

    name: str  # of `podling.cost.calibration.MEASURED`
    topology: str  # as the compiler names it
    build: Callable[[Mesh], Step]
    mesh: dict[str, int] = field(default_factory=lambda: {"data": 1})
    rows_axis: int = 1  # which axis of the tokens lies over `data`, where the program does not say
    kernel_flops: float = 0.0  # of custom kernels (Pallas), of one device, a step: the compiled program does not tell


def splash_flops(heads: int, head: int, context: int, layers: int, rows: int, again: bool = False) -> float:
    """Causal attention: 2 products forward (twice where it is repeated), 4 for keys and values, 3 for queries."""
    return (11 if again else 9) * context**2 * head * heads * layers * rows  # half of 2 x context^2 x head for each


def chat(name: str, topology: str) -> Case:
    rows = tpuchat.ROWS * tpuchat.MICRO_STEPS
    flops = splash_flops(tpuchat.HEADS, tpuchat.HEAD, tpuchat.CONTEXT, tpuchat.LAYERS, rows)
    return Case(name, topology, lambda mesh: tpuchat.build(), kernel_flops=flops)


def pod(name: str, topology: str, model: maxtext.Model, rows: int, keep: bool, mesh: dict[str, int]) -> Case:
    flops = splash_flops(
        model.heads // mesh["tensor"], model.head, maxtext.CONTEXT, model.layers, rows * mesh["tensor"], not keep
    )
    return Case(name, topology, lambda mesh: maxtext.build(mesh, model, rows, keep), mesh, kernel_flops=flops)


EIGHT = {"data": 8}
CASES = [
    Case("notebook v3-8", "v3:2x2", lambda mesh: gpt2_notebook.build(72, dropout=False), EIGHT, 0),
    Case("notebook with dropout v3-8", "v3:2x2", lambda mesh: gpt2_notebook.build(72, dropout=True), EIGHT, 0),
    chat("tpuchat v5e-1", "v5e:1x1"),
    chat("tpuchat v6e-1", "v6e:1x1"),
    Case("modded-nanogpt 1024 v6e-8", "v6e:2x4", lambda mesh: modded_nanogpt.build(1024), EIGHT),
    Case("modded-nanogpt 2048 v6e-8", "v6e:2x4", lambda mesh: modded_nanogpt.build(2048), EIGHT),
    pod("maxtext 16B v5e-256", "v5e:16x16", maxtext.Model(4096, 64, 28672, 32), 6, False, {"fsdp": 256, "tensor": 1}),
    pod("maxtext 32B v5p-128", "v5p:4x4x4", maxtext.Model(8192, 64, 28672, 32), 6, True, {"fsdp": 16, "tensor": 4}),
    pod(
        "maxtext 22B v4-128",
        "v4:4x4x4",
        maxtext.Model(6144, 24, 24576, 48, head=256, gated=False),
        13,
        False,
        {"fsdp": 64, "tensor": 1},
    ),
]
