"""The step that training runs, taken as training takes it: batches handed over, metrics read one step late."""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np

from podling.config import Config
from podling.data.batches import Batch
from podling.train.batch_plan import BatchPlan
from podling.train.lowering import compiled_here, initial_state, lower_step
from podling.train.rows import put_batch
from podling.train.setup import Setup
from podling.train.step import DeviceBatch, TrainState


@dataclass(frozen=True)
class Taken:
    """A step that is done."""

    loss: float  # nats per token
    wait_s: float  # for its batch
    done_s: float  # on `time.perf_counter`, when its loss was read


class Steps:
    """The compiled step and its state, from the initial one on.

    Args:
        setup: what to run; its mesh must be the ambient one wherever this is used (`jax.set_mesh`).
        batches: of a step each, without end.
    """

    def __init__(self, setup: Setup, batches: Iterator[Batch]):
        self.setup, self._batches = setup, batches
        began_s = time.perf_counter()
        lowered = lower_step(setup.config, setup.mesh, setup.dtype, setup.plan.micro_batch, setup.plan.micro_steps)
        self.compiled: jax.stages.Compiled = compiled_here(lowered, setup.mesh)
        self.compile_s = time.perf_counter() - began_s
        self.state: TrainState = initial_state(setup.config, setup.mesh)

    def take(self, steps: int, until_s: float = float("inf")) -> list[Taken]:
        """Take so many steps, or fewer, but one, if time is up.

        Args:
            steps: at most.
            until_s: no step is begun after this, on `time.perf_counter`.
        """
        taken: list[Taken] = []
        pending: tuple[Any, float] | None = None
        for number in range(steps):
            if number and time.perf_counter() > until_s:
                break
            began_s = time.perf_counter()
            batch = next(self._batches)
            wait_s = time.perf_counter() - began_s
            self.state, metrics = self.compiled(self.state, self.put(batch))
            if pending is not None:
                taken.append(_read(*pending))
            pending = metrics, wait_s
        if pending is not None:
            taken.append(_read(*pending))
            jax.block_until_ready(self.state)
        return taken

    def put(self, batch: Batch) -> DeviceBatch:
        """Lay a batch out over the mesh."""
        return put_batch(batch, self.setup.mesh, self.setup.plan.micro_batch)


def _read(metrics: Any, wait_s: float) -> Taken:
    return Taken(float(jax.device_get(metrics).loss), wait_s, time.perf_counter())


def in_turn(tokens: np.ndarray, plan: BatchPlan) -> Iterator[Batch]:
    """Batches of given tokens, the same ones again and again.

    Args:
        tokens: int32 [batches, rows, context + 1].
        plan: how a step's rows are cut.
    """
    shape = (plan.micro_steps, plan.micro_batch, plan.context)
    for number in count():
        window = tokens[number % len(tokens)]
        inputs, targets = (np.ascontiguousarray(part).reshape(shape) for part in (window[:, :-1], window[:, 1:]))
        yield Batch(inputs, targets, np.ones(shape, np.float32))


def resolved(config: Config, vocab_size: int) -> Config:
    """A configuration as data would settle it: the vocabulary known, and the number of steps."""
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    train = dataclasses.replace(config.train, steps=config.train.total_steps, tokens=0)
    return dataclasses.replace(config, model=model, train=train)
