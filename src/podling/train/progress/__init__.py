"""What a person sees of a run: a live view in a terminal, plain lines in a log, one tidy display in a notebook."""

from podling.train.progress.choose import make_reporter
from podling.train.progress.live import LiveReporter
from podling.train.progress.notebook import NotebookReporter
from podling.train.progress.plain import PlainReporter
from podling.train.progress.protocol import Baselines, Reporter
from podling.train.progress.quiet import QuietReporter

__all__ = [
    "Baselines",
    "LiveReporter",
    "NotebookReporter",
    "PlainReporter",
    "QuietReporter",
    "Reporter",
    "make_reporter",
]
