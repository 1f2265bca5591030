"""Runs watched from within: the state each session ends with, and the batches it trained on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from podling.data.batches import Batches
from podling.parallel import device
from podling.train.loop import Run


@dataclass
class Watched:
    """What the sessions in a `watch` block did."""

    states: list[Any] = field(default_factory=list)
    """After the last step, one for each session that came to its end."""
    batches: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """Rows of each step, counted from 0, as often as they were read."""


@contextlib.contextmanager
def watch() -> Iterator[Watched]:
    """Keep what sessions do; the machine's speed is not measured meanwhile."""
    seen, steps, batch = Watched(), Run.steps, Batches.batch

    def watched_steps(self: Run, *args: Any) -> Any:
        seen.states.append(steps(self, *args))
        return seen.states[-1]

    def watched_batch(self: Batches, step: int) -> Any:
        found = batch(self, step)
        seen.batches.setdefault(step, []).append(found.inputs.reshape(-1, self.context))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_measure_gemm", lambda chip: 1e11)
        patch.setattr(Run, "steps", watched_steps)
        patch.setattr(Batches, "batch", watched_batch)
        yield seen
