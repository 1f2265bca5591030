"""Named waits with time limits: a process that waits for others never waits for ever, and says for whom."""

import contextlib
from collections.abc import Callable, Iterator

from podling.parallel.hosts import Hosts

ARRIVAL_S = 60.0
"""How long the others may be late at a wait."""
COMPILE_S = 30 * 60.0
"""How long they may be late where each of them compiles first."""


class Waits:
    """The waits of one run; every process enters the same ones in the same order.

    A thread watches. When a process is lost, or late past a wait's limit, it says so and ends this process with exit code 1:
    the main thread may hang in a collective that will never end.

        waits = Waits(hosts, say)
        with waits("first step", limit_s=COMPILE_S):
            ...
        waits.saved(step)  # for the last line: where the run will carry on

    With one process nothing is watched.
    """

    def __init__(self, hosts: Hosts, say: Callable[[str], None] = print):
        self.hosts = hosts

    @contextlib.contextmanager
    def __call__(self, name: str, limit_s: float | None = ARRIVAL_S) -> Iterator[None]:
        """Wait for all processes inside the block.

        Args:
            name: what a person would call it: "first step", "step 12", "evaluation of step 500".
            limit_s: how long the others may be late; None for as long as all are alive.
        """
        yield

    def saved(self, step: int) -> None:
        """A checkpoint of this step is complete."""
