"""What a long preparation tells the person waiting for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrepareEvent:
    """How far one stage of preparing text has come.

    `done_bytes` and `total_bytes` count UTF-8 text (file bytes in the first stage, which hashes files); `mb_per_s` is
    10^6 bytes a second since the stage began; `left_s` is None while it cannot be known.
    """

    stage: str
    done_bytes: int
    total_bytes: int | None
    mb_per_s: float
    left_s: float | None
    tokens: int


Progress = Callable[[PrepareEvent], None]


class Meter:
    """Turns counted bytes of one stage into events, at most a few a second."""

    def __init__(self, stage: str, total_bytes: int | None, progress: Progress | None, interval_s: float = 0.2):
        self.stage, self.total_bytes, self.progress, self.interval_s = stage, total_bytes, progress, interval_s
        self.done_bytes = self.tokens = self._resumed_bytes = 0
        self._began = self._told = time.monotonic()
        self._tell()

    def add(self, count_bytes: int, tokens: int = 0) -> None:
        """Count work done, and tell when it is time to."""
        self.done_bytes += count_bytes
        self.tokens += tokens
        if time.monotonic() - self._told >= self.interval_s:
            self._tell()

    def skip(self, count_bytes: int, tokens: int = 0) -> None:
        """Count work an earlier process did: it is done, but says nothing about this one's speed."""
        self.done_bytes += count_bytes
        self.tokens += tokens
        self._resumed_bytes += count_bytes

    def finish(self) -> None:
        """Tell the last figures of the stage."""
        self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self.progress is None:
            return
        worked_bytes = self.done_bytes - self._resumed_bytes
        elapsed_s = self._told - self._began
        rate = worked_bytes / elapsed_s if elapsed_s > 0 else 0.0
        left_s = None
        if self.total_bytes is not None and rate > 0:
            left_s = max(self.total_bytes - self.done_bytes, 0) / rate
        self.progress(PrepareEvent(self.stage, self.done_bytes, self.total_bytes, rate / 1e6, left_s, self.tokens))
