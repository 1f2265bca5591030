"""The step that training runs, on made-up tokens: the same devices, mesh, batch, program and hand-over of a batch."""

import dataclasses
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from podling.config import Config
from podling.parallel.device import compute_dtype, select_devices
from podling.parallel.mesh import batch_sharding, make_mesh
from podling.train.auto_mesh import Machine, joined, settle_mesh
from podling.train.batch_plan import BatchPlan, device_memory_bytes, plan_batch
from podling.train.flops import flops_per_token
from podling.train.lowering import lower_step
from podling.train.rows import place
from podling.train.step import DeviceBatch, StepMetrics, TrainState, init_state
from podling.tuning import settled

BATCHES = 8  # different ones, taken in turn


@dataclass(frozen=True)
class Setup:
    """What training would run on this machine, chosen as training chooses it."""

    config: Config
    """Settled for the devices."""
    devices: list[Any]
    mesh: Mesh
    plan: BatchPlan
    dtype: Any

    @classmethod
    def of(cls, config: Config) -> "Setup":
        """Choose devices, mesh and batch plan.

        Args:
            config: resolved (`vocab_size`, `steps` known).

        Raises:
            InputError: the device asked for is not there, or mesh and batch do not fit it.
        """
        devices = select_devices(config.run.device)
        dtype = compute_dtype(config.train.dtype, devices[0].platform)
        config = settled(config, devices[0].platform)
        memory = device_memory_bytes(devices)
        choice = settle_mesh(config, Machine(len(devices), joined(devices), memory), dtype.itemsize)
        mesh = make_mesh(choice.text, devices)
        return cls(config, devices, mesh, plan_batch(config, mesh.shape, dtype.itemsize, memory), dtype)

    @property
    def flops_per_step(self) -> int:
        """Of forward and backward, over all devices."""
        return flops_per_token(self.config.model) * self.plan.tokens


class Steps:
    """A compiled step and its state; `run` takes steps as the training loop does.

    Args:
        setup: what to run; its mesh must be the ambient one wherever this is used (`jax.set_mesh`).
        tokens: int32 [batches, rows, context + 1], taken in turn; made up where there are none.
    """

    def __init__(self, setup: Setup, tokens: np.ndarray | None = None):
        self.setup = setup
        self.tokens = made_up_tokens(setup) if tokens is None else tokens
        self.done = 0
        began_s = time.perf_counter()
        lowered = lower_step(setup.config, setup.mesh, setup.dtype, setup.plan.micro_batch, setup.plan.micro_steps)
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - began_s
        self.state: TrainState = jax.jit(init_state, static_argnums=0)(setup.config)

    def run(self, count: int) -> float:
        """Take `count` steps and return the loss of the last, in nats per token.

        Each step's metrics are read while the next one runs, as in training.
        """
        before, loss = None, float("nan")
        for _ in range(count):
            self.state, metrics = self.compiled(self.state, self._batch())
            if before is not None:
                loss = _read(before)
            before = metrics
        if before is not None:
            loss = _read(before)
            jax.block_until_ready(self.state)
        return loss

    def _batch(self) -> DeviceBatch:
        window = self.tokens[self.done % len(self.tokens)]
        self.done += 1
        plan = self.setup.plan
        shape = (plan.micro_steps, plan.micro_batch, plan.context)
        inputs, targets = (np.ascontiguousarray(part).reshape(shape) for part in (window[:, :-1], window[:, 1:]))
        arrays = (inputs, targets, np.ones(shape, np.float32))
        return DeviceBatch(*place(arrays, self._layout, plan.micro_batch, axis=1))

    @cached_property
    def _layout(self) -> Any:
        return batch_sharding(self.setup.mesh, "micro", "batch", "sequence")


def _read(metrics: StepMetrics) -> float:
    return float(jax.device_get(metrics).loss)


def made_up_tokens(setup: Setup, seed: int = 0) -> np.ndarray:
    """Random token ids, int32 [BATCHES, rows, context + 1]: what they are changes no speed."""
    shape = (BATCHES, setup.plan.rows, setup.plan.context + 1)
    return np.random.default_rng(seed).integers(0, setup.config.model.vocab_size, shape, np.int32)


def resolved(config: Config, vocab_size: int) -> Config:
    """A configuration as data would settle it: the vocabulary known, and the number of steps."""
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    train = dataclasses.replace(config.train, steps=config.train.total_steps, tokens=0)
    return dataclasses.replace(config, model=model, train=train)
