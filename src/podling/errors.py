"""What podling says when it cannot go on.

Every anticipated failure is an `PodlingError`; the command line prints it without a traceback and exits with its
code. Anything else that escapes is a bug in podling and keeps its traceback.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is, what it is, and what to do about it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    {self.fix}" if self.fix else "")


class PodlingError(Exception):
    """A failure podling foresaw. `problems` are all that were found, not just the first."""

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InputError(PodlingError):
    """The person's input (flags, configuration, data, run folder) cannot be used as it is."""

    exit_code = 2


class RunError(PodlingError):
    """The input was fine and the run still could not go on: a full disk, a non-finite loss, a lost device."""


def raise_if(problems: list[Problem]) -> None:
    """Raise one `InputError` with every problem, if there are any."""
    if problems:
        raise InputError(problems)


class Interrupted(RunError):
    """The person, or the machine, asked the run to stop, and it stopped cleanly."""

    def __init__(self, problem: Problem, signal_number: int):
        super().__init__(problem)
        self.exit_code = 128 + signal_number
