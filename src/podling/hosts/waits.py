"""Named waits with time limits: a process that waits for others never waits for ever, and says for whom."""

import contextlib
from collections.abc import Callable, Iterator

from podling.errors import PodlingError, RunError
from podling.hosts.hosts import ARRIVAL_S, Hosts

COMPILE_S = 30 * 60.0
"""How long the others may be late where each of them compiles first."""
STEP_S = 10 * 60.0
"""How long a step, an evaluation or a save may take: much longer than any should."""


class Waits:
    """The waits of one run. Every process enters the same ones, in the same order.

    A thread watches. When a process is lost, or a wait is not over by its limit, the thread says so and ends this
    process with exit code 1: the main thread may hang in a collective that will never end. With one process nothing is
    watched.

        waits = Waits(hosts)
        with waits("first step", limit_s=COMPILE_S):
            ...
        waits.ask_for_saved(checkpoints.latest)  # for the last line: where the run will carry on
    """

    def __init__(self, hosts: Hosts):
        self.hosts = hosts

    @contextlib.contextmanager
    def __call__(self, name: str, limit_s: float | None = ARRIVAL_S) -> Iterator[None]:
        """Wait for all processes inside the block.

        Args:
            name: what a person would call it: "first step", "step 12", "evaluation of step 500".
            limit_s: how long it may take; None for as long as all are alive.

        Raises:
            RunError: what was raised inside, when it is because another process is gone.
        """
        member = self.hosts.member
        if member is None:
            yield
            return
        with member.waiting(name, limit_s):
            try:
                yield
            except PodlingError:
                raise
            except Exception as error:  # a collective fails in many ways when its other end is gone
                problem = self.hosts.explain()
                if problem is None:
                    raise
                raise RunError(problem) from error

    def ask_for_saved(self, latest: Callable[[], int | None]) -> None:
        """Let the last line say of which step the newest complete checkpoint is; `latest` may run on any thread."""
        if self.hosts.member is not None:
            self.hosts.member.latest = latest
