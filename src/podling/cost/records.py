"""What the cost model says: plain records, which every way of reaching them shares. No JAX, and JSON-ready."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["matmul", "compute", "memory", "collective"]
"""What an instruction's time is bound by: the matrix unit, the vector unit, device memory, the links."""
KINDS: tuple[Kind, ...] = ("matmul", "compute", "memory", "collective")


@dataclass(frozen=True)
class OpTime:
    """One scheduled instruction of the program."""

    name: str
    computation: str
    op_name: str  # which line of the traced program it comes from
    kind: Kind
    times: int  # per step
    step_s: float  # all its times together; of a collective, what the step waits for it
    floor_s: float  # no chip of this kind is faster: operations at peak, bytes at full bandwidth
    cycles: int | None  # the compiler's estimate, once
    flops: int  # of matrix products, once
    hbm_bytes: int  # read and written, once
    links_s: float = 0.0  # of a collective: all its times on the links, what compute hides of it included


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one optimizer step on every device together."""

    step_s: float
    range_s: tuple[float, float]  # as far off as the calibration has been seen to be
    parts_s: dict[Kind, float]  # they add up to step_s
    calibration: str  # how sure it is, in words
    ops: tuple[OpTime, ...] = field(default=(), repr=False)  # most time first; empty for an analytic estimate


@dataclass(frozen=True)
class Tensor:
    """An array in device memory at the moment when most is held."""

    name: str  # `params.blocks.qkv_kernel`, or where in the model it is made
    category: str
    shape: str  # `bf16[12,8,1024,768]`, one device's
    device_bytes: int


CATEGORIES = ("parameters", "moments", "gradients", "activations", "logits", "temporary", "program")
"""Activations are what the forward pass keeps for the backward pass."""


@dataclass(frozen=True)
class Hbm:
    """Memory of one device, in bytes."""

    total_bytes: int
    limit_bytes: int
    by_category: dict[str, int]  # of CATEGORIES; they add up to total_bytes
    largest: tuple[Tensor, ...]  # most bytes first
    source: str  # "compiler", or "estimate" where there is none

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    @property
    def spare_bytes(self) -> int:
        """Negative when it does not fit."""
        return self.limit_bytes - self.total_bytes


@dataclass(frozen=True)
class Layout:
    """One way of running a step on a target: what the plan chooses among."""

    mesh: str  # as after --mesh
    micro_batch: int  # rows of one forward pass, over all devices
    accumulation: int  # forward passes a step
    remat: str
    loss_chunk: int

    def __str__(self) -> str:
        chunk = f"loss chunks of {self.loss_chunk}" if self.loss_chunk else "loss in one piece"
        cut = f"{self.accumulation} x {self.micro_batch} rows" if self.accumulation > 1 else f"{self.micro_batch} rows"
        return f"{self.mesh}, {cut}, remat {self.remat}, {chunk}"
