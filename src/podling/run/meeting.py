"""Barriers between the threads that write a checkpoint, which a failure in one process opens for all.

Orbax waits at its barriers for twenty minutes for a process whose disk is full and which will never come.
"""

from podling.parallel.hosts import Hosts, meet


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
        for number, told in enumerate(causes):
            if told:
                self._over = True
                raise Missed(f"process {number} of {self._hosts.count}: {told}")
