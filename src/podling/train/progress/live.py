"""The live view of a terminal: one panel that follows the run, above it what should stay."""

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from podling.data.events import PrepareEvent
from podling.train.progress.protocol import Baselines
from podling.train.progress.summary import summary_view
from podling.train.progress.words import (
    Curve,
    about,
    count,
    duration,
    evaluation_line,
    first_lines,
    loss,
    prepare_line,
    share,
)

WIDEST = 100  # columns of the panels; lines that are longer are hard to read
REFRESH_HZ = 4  # a refresh takes half a millisecond of the CPU


class LiveReporter:
    """See `Reporter`.

    Args:
        total_steps: of the whole run.
        stream: the terminal.
        width: columns; the terminal's own when None.
    """

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, width: int | None = None):
        self.total_steps = total_steps
        self.console = Console(file=stream, width=width, highlight=False)
        self._record: dict[str, Any] | None = None
        self._evaluation: dict[str, Any] | None = None
        self._baseline: Baselines | None = None
        self._curve = Curve()
        self._done = 0
        self._spinner: Spinner | None = None
        self._spinner_text: Callable[[], str] = str
        self._live: Live | None = None
        self._gone = False
        # An exception that nobody expected must not leave the terminal without its cursor.
        atexit.register(self.close)

    def say(self, text: str) -> None:
        """Print it above the panel."""
        self._print(Text(text))

    @contextlib.contextmanager
    def status(self, text: str, about_s: float | None = None) -> Iterator[Callable[[str], None]]:
        """A spinner with the time it has taken so far."""
        began, detail = time.monotonic(), ""

        def tell(words: str) -> None:
            nonlocal detail
            detail = f"  {words}"

        with self._spinning(lambda: f"{text}{about(about_s)}  {duration(time.monotonic() - began)}{detail}"):
            yield tell
        took_s = time.monotonic() - began
        if took_s >= 2:
            self.say(f"{text}: done in {took_s:.0f} s")

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Callable[[PrepareEvent], None]]:
        """A spinner with the newest event."""
        newest = "looking at the text"

        def tell(event: PrepareEvent) -> None:
            nonlocal newest
            newest = prepare_line(event)

        with self._spinning(lambda: newest):
            yield tell

    def begin(self, total_steps: int, start: int, baseline: Baselines | None = None) -> None:
        """The panel appears."""
        self.total_steps, self._done, self._baseline = total_steps, start, baseline
        self._record = self._record or {"step": start}
        self._start()

    def step(self, record: dict[str, Any]) -> None:
        """Seen at the next refresh."""
        self._record, self._done = record, record["step"]
        self._curve.add(record.get("loss"))

    def evaluation(self, record: dict[str, Any]) -> None:
        """In the panel, and a line that stays."""
        self._evaluation = record
        self.say(evaluation_line(record))

    def sample(self, text: str) -> None:
        """A panel of its own, which stays."""
        width = min(self.console.width, WIDEST)
        self._print(Panel(Text(first_lines(text)), title="a sample", title_align="left", box=box.ROUNDED, width=width))

    def summary(self, summary: dict[str, Any]) -> None:
        """The live view ends, and the summary is the last thing on the screen."""
        self.close()
        self._print(summary_view(summary, min(self.console.width, WIDEST)))

    def close(self) -> None:
        """Leave the last panel where it is and give the cursor back."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()
        self._record = None
        atexit.unregister(self.close)

    def __rich__(self) -> RenderableType:
        """The view at this moment; called by the refreshing thread."""
        parts: list[RenderableType] = []
        if self._record is not None:
            parts.append(self._panel(self._record))
        spinner = self._spinner
        if spinner is not None:
            spinner.update(text=Text(self._spinner_text()))
            parts.append(spinner)
        return Group(*parts)

    def _panel(self, record: dict[str, Any]) -> Panel:
        width = min(self.console.width, WIDEST)
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {self._done:,}/{self.total_steps:,}", style="bold"),
            ProgressBar(total=self.total_steps, completed=self._done),
            Text(f"{self._done / max(1, self.total_steps):.0%}  left {duration(record.get('left_s'))}"),
        )
        drawn = self._curve.draw(max(8, min(Curve.SIZE, width - 24)))
        curve = Text.assemble(("loss ", "dim"), (loss(record.get("loss")), "bold"), "  ", (drawn, "cyan"))
        lines: list[RenderableType] = [bar, curve, self._heldout(), self._figures(record)]
        return Panel(Group(*lines), box=box.ROUNDED, padding=(0, 1), width=width)

    def _heldout(self) -> Text:
        """The last evaluation, and the models to beat."""
        words: list[tuple[str, str]] = [("held-out ", "dim")]
        if self._evaluation is None:
            words += [("not evaluated yet", "dim")]
        else:
            beaten = self._baseline is not None and self._evaluation["val_loss"] < self._baseline.bigram_loss
            words += [
                (loss(self._evaluation["val_loss"]), "bold green" if beaten else "bold"),
                (f" at step {self._evaluation['step']:,}", ""),
            ]
        if self._baseline is not None:
            words += [
                ("   bigram ", "dim"),
                (loss(self._baseline.bigram_loss), ""),
                ("   unigram ", "dim"),
                (loss(self._baseline.unigram_loss), ""),
            ]
        return Text.assemble(*words)

    def _figures(self, record: dict[str, Any]) -> Text:
        lr = record.get("lr")
        named = [
            ("lr ", "-" if lr is None else f"{lr:.2e}"),
            ("", f"{count(record.get('tokens_per_s'))} tokens/s"),
            ("MFU ", share(record.get("mfu"))),
            ("data wait ", share(record.get("data_wait_share"))),
        ]
        if record.get("retraces"):
            named.append(("retraces ", str(record["retraces"])))
        words: list[tuple[str, str]] = []
        for name, value in named:
            words += [("   " if words else "", ""), (name, "dim"), (value, "")]
        return Text.assemble(*words)

    @contextlib.contextmanager
    def _spinning(self, text: Callable[[], str]) -> Iterator[None]:
        before = self._spinner, self._spinner_text
        self._spinner_text = text
        self._spinner = Spinner("dots")
        self._start()
        try:
            yield
        finally:
            self._spinner, self._spinner_text = before
            if self._spinner is None and self._record is None:
                self._stop_empty()

    def _start(self) -> None:
        if self._live is None and not self._gone:
            self._live = Live(self, console=self.console, refresh_per_second=REFRESH_HZ, transient=False)
            self._live.start()

    def _stop_empty(self) -> None:
        """Nothing is left to show; a Live without content would still hold the last line."""
        live, self._live = self._live, None
        if live is not None:
            live.transient = True
            live.stop()

    def _print(self, view: RenderableType) -> None:
        if self._gone:
            return
        try:
            self.console.print(view)
        except OSError:  # the terminal is gone; the run is not
            self._gone = True
