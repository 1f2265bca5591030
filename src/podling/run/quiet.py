"""Orbax tells of one failed write many times over, with tracebacks; the person reads it once, in words."""

import logging
import sys
from functools import cache
from typing import Any


@cache
def quiet_orbax() -> None:
    """Keep from stderr what reaches `Checkpoints.wait` as an exception anyway.

    Orbax's threads log every failure with its traceback. When one of several writes fails it closes its event loop
    under the others, and each of those reports `Event loop is closed` to `sys.unraisablehook`, or asyncio logs that
    nobody asked for its exception.
    """
    logging.getLogger("absl").addFilter(lambda record: record.exc_info is None or "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    hook = sys.unraisablehook

    def without_closed_loops(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = without_closed_loops
