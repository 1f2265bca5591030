"""Several processes that are one run: which of them this one is, what they tell one another, how they stop together.

A process that is alone goes through here too, and nothing is waited for.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from podling.errors import Problem, raise_if
from podling.hosts.member import Member
from podling.hosts.register import Register

ARRIVAL_S = 60.0
"""How long the others may be late at a wait."""


@dataclass(frozen=True)
class Hosts:
    """This process among those of the run."""

    process: int = 0
    count: int = 1
    member: Member | None = field(default=None, compare=False, repr=False)
    register: Register | None = field(default=None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """The one process that prints, and writes what there is one of."""
        return self.process == 0

    def __str__(self) -> str:
        return f"process {self.process} of {self.count}"

    def leave(self) -> None:
        """The run is over, or was stopped by agreement: end together.

        Raises:
            RunError: a process was lost at the very end.
        """
        if self.member is None:
            return
        import jax

        self.member.exchange("the end", None, ARRIVAL_S)
        jax.distributed.shutdown()
        self.member.leave("")
        if self.register is not None:
            self.register.close(limit_s=5)

    def fail(self, reason: str) -> bool:
        """This process cannot go on; the others hear why, and stop. Returns whether process 0 says the same."""
        if self.member is None:
            return False
        self.member.leave(reason)
        if self.is_first:
            time.sleep(0.3)  # its register has to pass it on
            return False
        return self.member.first_failed_alike(reason, limit_s=2)

    def explain(self) -> Problem | None:
        """What really happened, where this process fails because another one is gone; None when none is."""
        return None if self.member is None else self.member.explain(limit_s=5)


ALONE = Hosts()


def exchange(hosts: Hosts, name: str, value: Any, limit_s: float | None = ARRIVAL_S) -> list[Any]:
    """Every process's `value` (JSON), in the order of the processes; all wait for all.

    Raises:
        RunError: a process was lost, or did not arrive within the limit (None: for as long as all are alive).
    """
    return [value] if hosts.member is None else hosts.member.exchange(name, value, limit_s)


def meet(hosts: Hosts, key: str, value: Any) -> list[Any]:
    """`exchange` for a thread beside the main one, which does not disturb the order of the others.

    Args:
        hosts: the processes.
        key: used once in a session.
        value: JSON.

    Raises:
        RunError: a process was lost, or failed.
    """
    return [value] if hosts.member is None else hosts.member.meet(key, value)


def broadcast(hosts: Hosts, name: str, value: Any, limit_s: float | None = ARRIVAL_S) -> Any:
    """Process 0's `value` (JSON) in every process."""
    return exchange(hosts, name, value if hosts.is_first else None, limit_s)[0]


def agree(hosts: Hosts, name: str, facts: dict[str, str], limit_s: float | None = ARRIVAL_S) -> None:
    """Make sure that every process has the same facts as process 0.

    Raises:
        InputError: in every process, naming each field that differs, the processes where it does, and both values.
    """
    first, *others = exchange(hosts, name, facts, limit_s)
    problems: list[Problem] = []
    for field_name in {**first, **{key: "" for other in others for key in other}}:
        here = first.get(field_name, "not there")
        differing: dict[str, list[int]] = {}
        for process, other in enumerate(others, 1):
            there = other.get(field_name, "not there")
            if there != here:
                differing.setdefault(there, []).append(process)
        for there, processes in differing.items():
            some = ", ".join(map(str, processes[:8])) + (
                f" and {len(processes) - 8} more" if len(processes) > 8 else ""
            )
            who = "process" if len(processes) == 1 else "processes"
            what = f"is {there} in {who} {some}, and {here} in process 0"
            problems.append(Problem(field_name, what, "start every process with the same command and the same files"))
    raise_if(problems)


class StopVote:
    """A signal that any process saw becomes every process's, at the same step.

    Votes travel by the register and not as a collective beside the step's: on emulated devices the two have been seen
    to wait for one another for ever, and once to mix their messages.

    Args:
        hosts: the processes.
    """

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._unread: list[tuple[str, int]] = []
        self._cast = 0

    def vote(self, signal_number: int | None) -> None:
        """Once a step, in every process: the signal this one has seen, or None. Does not wait for the others."""
        key = f"vote {self._cast}"
        self._cast += 1
        self._unread.append((key, signal_number or 0))
        if self._hosts.member is not None:
            self._hosts.member.give(key, signal_number or 0)

    def read(self) -> int | None:
        """The signal that any process had seen at the oldest vote not yet read; the same answer in every process.

        Call it one step late: then the answer is there already. None when no signal was seen, or no vote is unread.

        Raises:
            RunError: a process was lost, or failed.
        """
        if not self._unread:
            return None
        key, mine = self._unread.pop(0)
        member = self._hosts.member
        return max([mine] if member is None else member.collect(key)) or None
