"""Several processes that are one run: how they find one another, agree, and stop together.

Nothing here costs a single process anything: `join` then returns at once and JAX is not imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from podling.errors import Problem


@dataclass(frozen=True)
class HostArgs:
    """What the flags said: all three, or none for what the cluster says."""

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1


@dataclass(frozen=True)
class Hosts:
    """This process among those of the run."""

    process: int = 0
    count: int = 1
    register: Any = field(default=None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """The one process that prints and writes what there is one of."""
        return self.process == 0

    def __str__(self) -> str:
        return f"process {self.process} of {self.count}"

    def leave(self, reason: str = "") -> None:
        """Tell the others that this process ends; with a `reason`, that it failed."""


ALONE = Hosts()


def host_problems(args: HostArgs) -> list[Problem]:
    """Everything wrong with the three flags, before JAX starts."""
    return []


def join(args: HostArgs, say: Callable[[str], None]) -> Hosts:
    """Start `jax.distributed` if there is more than one process."""
    return ALONE


def exchange(hosts: Hosts, name: str, value: Any) -> list[Any]:
    """Every process's `value` (JSON), in the order of the processes; all wait for all."""
    return [value]


def broadcast(hosts: Hosts, name: str, value: Any) -> Any:
    """Process 0's `value` (JSON) in every process."""
    return exchange(hosts, name, value if hosts.is_first else None)[0]


def agree(hosts: Hosts, name: str, facts: dict[str, str]) -> None:
    """Make sure that every process has the same facts.

    Raises:
        InputError: in every process, naming each field that differs, the process, and both values.
    """
    exchange(hosts, name, facts)


class StopVote:
    """A signal that any process saw becomes every process's, at the same step."""

    def __init__(self, hosts: Hosts, mesh: Any):
        self.hosts = hosts
        self._votes: list[int] = []

    def vote(self, signal_number: int | None) -> None:
        """Once a step, in every process: the signal this one saw, or None. Does not wait."""
        self._votes.append(signal_number or 0)

    def read(self) -> int | None:
        """The signal any process had seen at the oldest vote not yet read, the same in every process.

        Call it one step late: then the answer is there already. None when none was seen, or nothing is left to read.
        """
        return self._votes.pop(0) or None if self._votes else None
