"""The first half of the device gate: devices, mesh and batch of a configuration, for whoever has no data yet."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from podling.config import Config
from podling.parallel.axes import mesh_text
from podling.parallel.device import compute_dtype, select_devices
from podling.parallel.mesh import make_mesh
from podling.train.auto_mesh import Machine, joined, settle_mesh
from podling.train.batch_plan import BatchPlan, device_memory_bytes, plan_batch
from podling.train.flops import flops_per_token
from podling.tuning import MICRO_TOKENS, Choice, choices, settled


@dataclass(frozen=True)
class Setup:
    """What a step is compiled for, and why."""

    config: Config
    """Settled for the devices."""
    devices: list[Any]
    """Of all processes."""
    mesh: Mesh
    mesh_why: str
    """Empty where the mesh was given, or there was nothing to choose."""
    plan: BatchPlan
    dtype: Any
    """Of the compute."""
    choices: list[Choice]
    """What was settled."""

    @classmethod
    def of(cls, config: Config, device_bytes: int | None = None) -> "Setup":
        """Choose them.

        Args:
            config: resolved (`vocab_size`, `steps` known).
            device_bytes: memory of one device; None for that of this process's devices.

        Raises:
            InputError: the device asked for is not there, or mesh and batch do not fit it.
        """
        devices = select_devices(config.run.device)
        platform, kind = devices[0].platform, devices[0].device_kind
        dtype, chosen = compute_dtype(config.train.dtype, platform), choices(config, platform, kind)
        config = settled(config, platform, kind)
        memory_bytes = device_bytes or device_memory_bytes(_here(devices))
        choice = settle_mesh(config, Machine(len(devices), joined(devices), memory_bytes), dtype.itemsize)
        mesh = make_mesh(choice.text, devices)
        plan = plan_batch(config, mesh.shape, dtype.itemsize, memory_bytes, MICRO_TOKENS.get(platform))
        return cls(config, devices, mesh, choice.why, plan, dtype, chosen)

    @property
    def here(self) -> list[Any]:
        """The devices of this process."""
        return _here(self.devices)

    @property
    def flops_per_step(self) -> int:
        """Of forward and backward, over all devices."""
        return flops_per_token(self.config.model) * self.plan.tokens

    def said(self) -> list[str]:
        """What was chosen, in words."""
        sizes = self.mesh.shape
        shape = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
        lines = [f"device: {len(self.devices)} x {self.devices[0].device_kind} ({shape}), {self.dtype.name}"]
        lines += [f"mesh: {mesh_text(sizes)}; {self.mesh_why}"] if self.mesh_why else []
        return [*lines, f"batch: {self.plan}", *(f"step: {choice}" for choice in self.choices if choice.said)]


def _here(devices: list[Any]) -> list[Any]:
    return [device for device in devices if device.process_index == jax.process_index()]
