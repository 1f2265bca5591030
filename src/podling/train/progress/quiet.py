"""For the processes of a run that are not its first: one of them shows the run, the others say nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from podling.data.events import PrepareEvent
from podling.train.progress.protocol import Baselines


class QuietReporter:
    """See `Reporter`."""

    def say(self, text: str) -> None:
        """The first process says it."""

    @contextlib.contextmanager
    def status(self, text: str, about_s: float | None = None) -> Iterator[Callable[[str], None]]:
        """Nothing is shown."""
        yield lambda detail: None

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Callable[[PrepareEvent], None]]:
        """Nothing is shown."""
        yield lambda event: None

    def begin(self, total_steps: int, start: int, baseline: Baselines | None = None) -> None:
        """Nothing is shown."""

    def step(self, record: dict[str, Any]) -> None:
        """Nothing is shown."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """Nothing is shown."""

    def sample(self, text: str) -> None:
        """Nothing is shown."""

    def summary(self, summary: dict[str, Any]) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is held."""
