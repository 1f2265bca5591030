"""Ctrl-C, SIGTERM and a closed terminal become a request that the loop answers between two steps."""

import signal
import threading
from types import FrameType

from podling.hosts.hosts import StopVote
from podling.train.together import Together


class StopRequest:
    """While active, the first SIGINT, SIGTERM or SIGHUP is only noted; a second Ctrl-C interrupts at once.

    Notebooks and free sessions are ended with SIGTERM: there is time to save if the step in hand may finish first.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Ignored stays ignored: that is how nohup lets a run outlive its terminal.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: it was not set from Python, and cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number


class AgreedStop:
    """A signal that any process saw, answered by all of them after the same step.

    Args:
        request: of this process.
        together: the processes.
    """

    def __init__(self, request: StopRequest, together: Together):
        self._request, self._together = request, together
        self._vote = StopVote(together.hosts)

    def poll(self) -> int | None:
        """The signal to answer now, or None; asked once a step in every process, at the same place.

        With several processes it is what they knew one step ago: their votes travel while the device works.
        """
        if self._together.hosts.count == 1:
            return self._request.signal_number
        agreed = self._vote.read()
        self._vote.vote(self._request.signal_number)
        return agreed

    def last(self) -> int | None:
        """The same at the end of the steps, where waiting for one another costs nothing."""
        numbers = self._together.exchange("signals", self._request.signal_number)
        return max((number for number in numbers if number is not None), default=None)
