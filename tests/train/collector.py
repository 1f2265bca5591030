"""A reporter that keeps everything it is told, and calls back at each step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class Collector:
    """Implements `podling.train.progress.Reporter`."""

    def __init__(self, at_step: Callable[[int], None] | None = None):
        self.said: list[str] = []
        self.statuses: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.samples: list[str] = []
        self.summaries: list[dict[str, Any]] = []
        self.began: list[tuple[int, int, Any]] = []
        self._at_step = at_step

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextlib.contextmanager
    def status(self, text: str, about_s: float | None = None) -> Iterator[Callable[[str], None]]:
        self.statuses.append(text)
        yield lambda detail: self.statuses.append(f"{text}: {detail}")

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Callable[[Any], None]]:
        yield lambda event: None

    def begin(self, total_steps: int, start: int, baseline: Any = None) -> None:
        self.began.append((total_steps, start, baseline))

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)
        if self._at_step is not None:
            self._at_step(record["step"])

    def evaluation(self, record: dict[str, Any]) -> None:
        self.evaluations.append(record)

    def sample(self, text: str) -> None:
        self.samples.append(text)

    def summary(self, summary: dict[str, Any]) -> None:
        self.summaries.append(summary)

    def close(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "\n".join(self.said)
