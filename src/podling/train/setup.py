"""Devices, mesh and batch of a configuration, as training chooses them, for whoever needs no data."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from podling.config import Config
from podling.parallel.device import compute_dtype, select_devices
from podling.parallel.mesh import make_mesh
from podling.train.auto_mesh import Machine, joined, settle_mesh
from podling.train.batch_plan import BatchPlan, device_memory_bytes, plan_batch
from podling.train.flops import flops_per_token
from podling.tuning import settled


@dataclass(frozen=True)
class Setup:
    """What a step of one process is compiled for."""

    config: Config
    """Settled for the devices."""
    devices: list[Any]
    mesh: Mesh
    plan: BatchPlan
    dtype: Any
    """Of the compute."""

    @classmethod
    def of(cls, config: Config) -> "Setup":
        """Choose them.

        Args:
            config: resolved (`vocab_size`, `steps` known).

        Raises:
            InputError: the device asked for is not there, or mesh and batch do not fit it.
        """
        devices = select_devices(config.run.device)
        dtype = compute_dtype(config.train.dtype, devices[0].platform)
        config = settled(config, devices[0].platform)
        memory_bytes = device_memory_bytes(devices)
        choice = settle_mesh(config, Machine(len(devices), joined(devices), memory_bytes), dtype.itemsize)
        mesh = make_mesh(choice.text, devices)
        return cls(config, devices, mesh, plan_batch(config, mesh.shape, dtype.itemsize, memory_bytes), dtype)

    @property
    def flops_per_step(self) -> int:
        """Of forward and backward, over all devices."""
        return flops_per_token(self.config.model) * self.plan.tokens
