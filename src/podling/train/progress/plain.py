"""Lines for a log file, a pipe, or a notebook's shell command: no bar, no colour, nothing rewritten."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType

from podling.data.events import PrepareEvent
from podling.train.progress.protocol import Baselines
from podling.train.progress.summary import summary_view
from podling.train.progress.words import about, evaluation_line, first_lines, prepare_line, step_line

WIDTH = 100  # columns of the summary
QUIET_S = 10.0  # between lines about one stage of preparing


class PlainReporter:
    """See `Reporter`. One line per `log_every` steps.

    Args:
        total_steps: of the whole run.
        log_every: steps between lines.
        stream: where lines go.
        clock: seconds; injected in tests.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_every: int = 10,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps = total_steps
        self.log_every = max(1, log_every)
        self.baseline: Baselines | None = None
        self._stream: TextIO | None = stream or sys.stdout
        self._clock = clock

    def say(self, text: str) -> None:
        """Print it."""
        if self._stream is None:
            return
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader of the pipe or the terminal is gone; the run is not
            self._stream = None

    @contextlib.contextmanager
    def status(self, text: str, about_s: float | None = None) -> Iterator[Callable[[str], None]]:
        """A line when it begins, one now and then, and how long it took if that was worth a line."""
        self.say(f"{text}{about(about_s)} ...")
        began = told = self._clock()

        def tell(detail: str) -> None:
            nonlocal told
            if self._clock() - told >= QUIET_S:
                told = self._clock()
                self.say(f"{text}: {detail}")

        yield tell
        took_s = self._clock() - began
        if took_s >= 2:
            self.say(f"{text}: done in {took_s:.0f} s")

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Callable[[PrepareEvent], None]]:
        """A line for each stage, and one now and then while it lasts."""
        stage, told = "", 0.0

        def tell(event: PrepareEvent) -> None:
            nonlocal stage, told
            now = self._clock()
            if event.stage != stage:
                stage, told = event.stage, now
                self.say(f"{event.stage} ...")
            elif now - told >= QUIET_S:
                told = now
                self.say(prepare_line(event))

        yield tell

    def begin(self, total_steps: int, start: int, baseline: Baselines | None = None) -> None:
        """Steps begin, after `start` that are done."""
        self.total_steps, self.baseline = total_steps, baseline
        if baseline is not None:
            self.say(f"to beat: unigram {baseline.unigram_loss:.4f}, bigram {baseline.bigram_loss:.4f} nats/token")

    def step(self, record: dict[str, Any]) -> None:
        """Every `log_every` steps, and the last."""
        if record["step"] % self.log_every == 0 or record["step"] == self.total_steps:
            self.say(step_line(record, self.total_steps))

    def evaluation(self, record: dict[str, Any]) -> None:
        """One line."""
        self.say(evaluation_line(record, self.baseline))

    def sample(self, text: str) -> None:
        """The first lines of it, indented."""
        lines = first_lines(text).split("\n")
        self.say("\n".join(["a sample:", *(f"    {line}" for line in lines)]))

    def summary(self, summary: dict[str, Any]) -> None:
        """A table without colours."""
        self._render(summary_view(summary, WIDTH))

    def close(self) -> None:
        """Nothing is held."""

    def _render(self, view: RenderableType) -> None:
        # Not stdout, not even to capture: rich ends the program when stdout's reader is gone.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"  # which decides what its boxes are drawn with
        text = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="")
        Console(file=text, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False).print(view)
        text.seek(0)
        self.say("\n".join(line.rstrip() for line in text.read().rstrip("\n").split("\n")))
