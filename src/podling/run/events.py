"""TensorBoard event files, written where they are made.

tensorboardX's `SummaryWriter` writes from a thread of its own; on a full disk that thread dies, its queue fills, and
the run waits for it without end. Its synchronous parts have no such thread: a failed write is an error like any other.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from podling.errors import PodlingError
from podling.files import writing


class EventFile:
    """One session's events.

    Args:
        folder: of all sessions of the run.
        restored_step: TensorBoard is told to forget what earlier sessions wrote after it.

    Raises:
        RunError: the disk is full.
    """

    def __init__(self, folder: Path, restored_step: int):
        self._folder = folder
        self._told = False  # that a write failed
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            resumed = any(folder.iterdir())
            # Without the suffix two sessions begun in the same second write, and overwrite, one file.
            self._writer = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")
        if resumed:
            started = event_pb2.SessionLog.START  # pyright: ignore[reportAttributeAccessIssue]
            self._write(step=restored_step + 1, session_log={"status": started})

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write the values of one step; they may stay in memory until `flush`.

        Raises:
            RunError: the disk is full.
        """
        self._write(step=step, summary={"value": [{"tag": t, "simple_value": v} for t, v in values.items()]})

    def flush(self) -> None:
        """Bring what was written to the disk.

        Raises:
            RunError: the disk is full.
        """
        with self._writing():
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file.

        Raises:
            RunError: the disk is full, and that was not told before: what a failed write left behind fails once more.
        """
        with contextlib.suppress(OSError) if self._told else self._writing():
            self._writer.close()

    def _write(self, **fields: Any) -> None:
        # The generated classes are made at import time, out of a type checker's sight.
        event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
        with self._writing():
            self._writer.write_event(event)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with writing(self._folder):
                yield
        except PodlingError:
            self._told = True
            raise
