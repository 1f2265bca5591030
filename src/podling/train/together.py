"""What processes of one run do together: all go through a gate or none, and nobody waits without a name and a limit."""

import contextlib
import hashlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import podling
from podling.config import Config, flags
from podling.data.shards import Prepared
from podling.errors import InputError, PodlingError, Problem, RunError, raise_if
from podling.hosts.hosts import ALONE, ARRIVAL_S, Hosts, agree, broadcast, exchange
from podling.hosts.waits import Waits

# Processes may differ in these: where each finds the text (which the fingerprints prove the same) and keeps it
# prepared, and what only the first one does.
OWN = {("data", "paths"), ("data", "cache"), ("run", "log_every"), ("run", "tensorboard"), ("run", "wandb")}
VISIBLE_S = 10.0  # how long a shared file system may take to show a new file


@dataclass(frozen=True)
class Together:
    """This process among those of the run; a run of one process goes through here too, and nothing is waited for."""

    hosts: Hosts = ALONE

    @cached_property
    def waits(self) -> Waits:
        """Named waits, watched by a thread."""
        return Waits(self.hosts)

    @property
    def is_first(self) -> bool:
        """This process prints and writes what there is one of."""
        return self.hosts.is_first

    def broadcast(self, name: str, value: Any, limit_s: float | None = ARRIVAL_S) -> Any:
        """The first process's `value` (JSON) in all."""
        return broadcast(self.hosts, name, value, limit_s)

    def exchange(self, name: str, value: Any, limit_s: float | None = ARRIVAL_S) -> list[Any]:
        """The values (JSON) of all processes, in their order."""
        return exchange(self.hosts, name, value, limit_s)

    def agree(self, name: str, facts: dict[str, str]) -> None:
        """See `hosts.agree`."""
        agree(self.hosts, name, facts)

    @contextlib.contextmanager
    def gate(self, name: str, limit_s: float | None = None) -> Iterator[None]:
        """All processes leave the block, or none: what went wrong in one stops all, with its words.

        Args:
            name: of what is done here, for those who wait.
            limit_s: how long one may take longer than another; None for as long as all are alive.

        Raises:
            InputError: every failure in the block was one.
            RunError: or one was not.
        """
        if self.hosts.count == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self.exchange(name, None if failure is None else _told(failure), limit_s)
        failed = {process: failure for process, failure in enumerate(told) if failure is not None}
        if not failed:
            return
        if failure is not None and not isinstance(failure, PodlingError):
            raise failure  # not foreseen: its traceback tells where
        raise self._error(failed) from failure

    def _error(self, failed: dict[int, Any]) -> PodlingError:
        kind = InputError if all(failure["exit_code"] == 2 for failure in failed.values()) else RunError
        listed = [failure["problems"] for failure in failed.values()]
        if len(failed) == self.hosts.count and all(problems == listed[0] for problems in listed):
            return kind([Problem(*problem) for problem in listed[0]])
        return kind(
            [
                Problem(f"process {process} of {self.hosts.count}: {where}", what, fix)
                for process, failure in failed.items()
                for where, what, fix in failure["problems"]
            ]
        )


def _told(failure: Exception) -> dict[str, Any]:
    if isinstance(failure, PodlingError):
        problems = [[problem.where, problem.what, problem.fix] for problem in failure.problems]
        return {"exit_code": failure.exit_code, "problems": problems}
    return {"exit_code": 1, "problems": [["podling", f"{type(failure).__name__}: {failure}", "not foreseen"]]}


def agree_on_setup(together: Together, config: Config) -> None:
    """Refuse processes that would not compute the same run.

    Raises:
        InputError: in every process, naming the fields that differ and the process.
    """
    if together.hosts.count == 1:
        return
    facts = {
        flag.name: repr(getattr(getattr(config, flag.section), flag.field))
        for flag in flags()
        if (flag.section, flag.field) not in OWN
    }
    facts |= {name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain")}
    facts |= {"podling": podling.__version__, "podling's code": _code_digest()}
    together.agree("configuration", facts)


def agree_on_data(together: Together, prepared: Prepared, paths: tuple[str, ...]) -> None:
    """Refuse processes that would learn from different tokens.

    Args:
        together: the processes.
        prepared: what this one has.
        paths: where this one read it.

    Raises:
        InputError: in every process, saying what each has, where it is prepared and what it was read from.
    """
    if together.hosts.count == 1:
        return
    place = f"in {prepared.path}, from {' '.join(paths) or 'text found there'}"
    tokens = f"{len(prepared.tokens('train')):,} training tokens"
    mine = {"tokenizer": prepared.tokenizer.fingerprint, "data": prepared.fingerprint, "tokens": tokens, "place": place}
    first, *others = together.exchange("the same data", mine)
    problems: dict[str, Problem] = {}  # one for each other data, however many processes have it
    for process, other in enumerate(others, 1):
        # Tokens differ with their tokenizer: then that is what to look at.
        name = next((name for name in ("tokenizer", "data") if other[name] != first[name]), None)
        if name is not None:
            there, here = (f"{has[name][:12]} ({has['tokens']} {has['place']})" for has in (other, first))
            what = f"differs: process {process} has {there}, and process 0 has {here}"
            fix = "give every process the same text; it may lie at another path in each"
            problems.setdefault(other[name], Problem(name, what, fix))
    raise_if(list(problems.values()))


def _code_digest() -> str:
    digest = hashlib.sha256()
    root = Path(podling.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def check_shared(together: Together, folder: Path) -> None:
    """Make sure that all processes see one run folder: each writes its part of every checkpoint there.

    Raises:
        InputError: in every process, naming those that do not see what the first one has written.
    """
    if together.hosts.count == 1:
        return
    token = folder / f".shared.{together.broadcast('run folder', uuid.uuid4().hex)}"
    try:
        with together.gate("writing to the run folder"):
            if together.is_first:
                token.touch()
        with together.gate("looking into the run folder", limit_s=VISIBLE_S + ARRIVAL_S):
            until = time.monotonic() + VISIBLE_S
            while not token.exists():
                if time.monotonic() > until:
                    what = "this process does not see what process 0 writes there"
                    fix = "several processes need one folder that all machines share, at the same path"
                    raise InputError(Problem(f"--out {folder}", what, fix))
                time.sleep(0.1)
    finally:
        if together.is_first:
            token.unlink(missing_ok=True)
