"""Barriers between the threads that write a checkpoint, which a failure in one process opens for all.

Orbax waits at its barriers for twenty minutes for a process whose disk is full and which will never come.
"""

from podling.hosts.hosts import Hosts, meet


class Missed(Exception):
    """Another process could not write its part. The message says which, and why."""


class Meetings:
    """The barriers of one save after another, numbered alike in every process."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._save = ""
        self._met = 0
        self._over = False

    def begin(self, step: int) -> None:
        """A new save; by then nobody is at a barrier of the last one."""
        self._save, self._met, self._over = f"save of step {step}", 0, False

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax calls instead of its own barrier.

        Raises:
            Missed: a process failed on its way here.
        """
        self._meet("")

    def miss(self, cause: str) -> None:
        """Tell the others, who are at this process's next barrier or on their way there."""
        if not self._over:
            try:
                self._meet(cause)
            except Missed:
                pass

    def _meet(self, cause: str) -> None:
        self._met += 1
        causes = meet(self._hosts, f"{self._save}, {self._met}", cause)
        if any(causes):
            self._over = True
            raise Missed(self.whose(causes))

    def whose(self, causes: list[str]) -> str:
        """One failure in words, with the process where there are several."""
        number, cause = next((number, cause) for number, cause in enumerate(causes) if cause)
        alone = self._hosts.count == 1 or cause.startswith("process ")
        return cause if alone else f"process {number} of {self._hosts.count}: {cause}"


def cause_of(error: BaseException) -> str:
    """The operating system's words where they can be found, else the first line of the message."""
    text = str(error)
    if isinstance(error, Missed):
        return text
    for known in ("No space left on device", "File too large", "Disk quota exceeded", "Read-only file system"):
        if known in text:
            return known
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
