"""The form for a notebook kernel: a few printed lines, and one display that is updated in place."""

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from podling.data.events import PrepareEvent
from podling.train.progress.plain import PlainReporter
from podling.train.progress.protocol import Baselines
from podling.train.progress.words import Curve, about, count, duration, loss, prepare_line, share

REFRESH_S = 0.5


class View:
    """Something a notebook shows: rich text where it can, plain text elsewhere."""

    def __init__(self, rows: list[tuple[str, str]]):
        self.rows = rows

    def __repr__(self) -> str:
        return "   ".join(f"{name} {value}" for name, value in self.rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.rows
        )
        return f"<table style='font-family:monospace'>{cells}</table>"


class NotebookReporter(PlainReporter):
    """See `Reporter`; step and status lines go into one display instead of down the page."""

    def __init__(self, total_steps: int, *, display: Callable[..., Any] | None = None):
        super().__init__(total_steps)
        self._display = display or kernel_display()
        self._handle: Any = None
        self._shown = 0.0
        self._doing = ""
        self._record: dict[str, Any] = {}
        self._evaluation: dict[str, Any] | None = None
        self._curve = Curve()

    @contextlib.contextmanager
    def status(self, text: str, about_s: float | None = None) -> Iterator[Callable[[str], None]]:
        """In the display while it lasts."""
        before, self._doing = self._doing, f"{text}{about(about_s)}"

        def tell(detail: str) -> None:
            self._doing = f"{text}: {detail}"
            self._show()

        self._show(now=True)
        try:
            yield tell
        finally:
            self._doing = before
            self._show(now=True)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Callable[[PrepareEvent], None]]:
        """In the display while it lasts."""

        def tell(event: PrepareEvent) -> None:
            self._doing = prepare_line(event)
            self._show()

        try:
            yield tell
        finally:
            self._doing = ""
            self._show(now=True)

    def begin(self, total_steps: int, start: int, baseline: Baselines | None = None) -> None:
        """The display appears."""
        self.total_steps, self.baseline = total_steps, baseline
        self._record = {"step": start}
        self._show(now=True)

    def step(self, record: dict[str, Any]) -> None:
        """In the display."""
        self._record = record
        self._curve.add(record.get("loss"))
        self._show(now=record["step"] == self.total_steps)

    def evaluation(self, record: dict[str, Any]) -> None:
        """In the display."""
        self._evaluation = record
        self._show(now=True)

    def _show(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._shown < REFRESH_S:
            return
        self._shown = time.monotonic()
        view = View(self._rows())
        if self._handle is None:
            self._handle = self._display(view, display_id=True)
        else:
            self._handle.update(view)

    def _rows(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        record = self._record
        if record:
            done = record["step"]
            left = f"{done / max(1, self.total_steps):.0%}, {duration(record.get('left_s'))} left"
            rows.append(("step", f"{done:,}/{self.total_steps:,}  ({left})"))
        if "loss" in record:
            lr = record.get("lr")
            rows += [
                ("loss", f"{loss(record['loss'])}  {self._curve.draw(40)}"),
                ("learning rate", "-" if lr is None else f"{lr:.2e}"),
                ("speed", f"{count(record.get('tokens_per_s'))} tokens/s, MFU {share(record.get('mfu'))}"),
                ("data wait", share(record.get("data_wait_share"))),
            ]
        if self._evaluation is not None:
            rows.append(("held-out loss", f"{loss(self._evaluation['val_loss'])} at step {self._evaluation['step']:,}"))
        if self.baseline is not None:
            rows.append(("to beat", f"bigram {loss(self.baseline.bigram_loss)}"))
        if self._doing:
            rows.append(("now", self._doing))
        return rows


def in_notebook() -> bool:
    """Whether this very process is a notebook kernel; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def kernel_display() -> Callable[..., Any]:
    """The kernel's own display function."""
    from importlib import import_module

    return import_module("IPython.display").display
