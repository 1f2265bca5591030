"""Which form fits where the output goes."""

import os
import sys
from typing import Literal

from podling.train.progress.live import LiveReporter
from podling.train.progress.notebook import NotebookReporter, in_notebook
from podling.train.progress.plain import PlainReporter
from podling.train.progress.protocol import Reporter

Kind = Literal["auto", "live", "plain", "notebook"]


def make_reporter(total_steps: int, *, json: bool = False, log_every: int = 10, kind: Kind = "auto") -> Reporter:
    """A live view on a terminal, one display in a notebook kernel, plain lines everywhere else.

    Args:
        total_steps: of the whole run; `Reporter.begin` corrects it.
        json: stdout is kept for one JSON object; everything here goes to stderr.
        log_every: steps between plain lines.
        kind: a form by name, or auto.
    """
    stream = sys.stderr if json else sys.stdout
    if kind == "auto":
        kind = _fitting(stream.isatty())
    if kind == "notebook":
        return NotebookReporter(total_steps)
    if kind == "live":
        return LiveReporter(total_steps, stream=stream)
    return PlainReporter(total_steps, log_every=log_every, stream=stream)


def _fitting(terminal: bool) -> Kind:
    if in_notebook():
        return "notebook"
    # A notebook's `!command` gives its child a pseudo-terminal but shows every redrawn line below the last.
    below_kernel = "JPY_PARENT_PID" in os.environ
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return "live" if terminal and not below_kernel and not dumb else "plain"
