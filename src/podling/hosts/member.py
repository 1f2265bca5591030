"""A process's side of the register: it says where it is, hears where the others are, and decides when to give up."""

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from podling.errors import InputError, Problem, RunError
from podling.hosts.register import SILENT_S

BEAT_S = 1.0
GRACE_S = 5.0
"""A process that failed is not the end of this one at once: often all fail alike, and each has its own words for it."""


def end_at_once(problem: Problem) -> None:
    """Say it and end this process with exit code 1, whatever its main thread hangs in."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(2, f"podling: stopped\n  {problem}\n".encode())
    os._exit(1)


@dataclass(frozen=True)
class Wait:
    """A place in the program where this process needs the others."""

    name: str
    order: int
    since_s: float
    limit_s: float | None
    raises: bool  # the main thread itself looks at the clock


class Member:
    """The connection of one process, with a thread that reads and a thread that watches.

    Args:
        link: connected to the register.
        process: the number of this process.
        count: of processes.
        silent_s: how long process 0 may send nothing.
    """

    def __init__(self, link: socket.socket, process: int, count: int, silent_s: float = SILENT_S):
        self.process, self.count, self.silent_s = process, count, silent_s
        self.latest: Callable[[], int | None] = lambda: None  # the step of the newest checkpoint
        self.end: Callable[[Problem], None] = end_at_once
        self._link, self._lines = link, link.makefile("rb")
        self._news = threading.Condition()
        self._waits: list[Wait] = []
        self._last = Wait("start", 0, time.monotonic(), None, True)
        self._orders, self._keys = itertools.count(1), itertools.count(1)
        self._table: list[Any] = [None] * count
        self._values: dict[str, list[Any]] = {}
        self._heard_s = time.monotonic()
        self._failed_s: float | None = None  # when another process was first seen to have failed
        self._seated = self._left = False
        self._send_lock = threading.Lock()

    def sit_down(self) -> None:
        """Say who this is, and start the threads.

        Raises:
            InputError: the register is not that of this run, or this process's number is taken.
        """
        who = f"{socket.gethostname()}, process id {os.getpid()}"
        self._link.settimeout(10)
        try:
            self._send({"hello": self.process, "count": self.count, "who": who})
            answer = json.loads(self._lines.readline())
        except (OSError, ValueError):
            answer = {}
        if "refused" in answer:
            self.close()
            raise InputError(Problem(*answer["refused"]))
        if answer.get("welcome") != self.count:
            peer = "{}:{}".format(*self._link.getpeername()[:2])
            self.close()
            what = f"something answers at {peer}, and it is not process 0 of a podling run"
            raise InputError(Problem("--coordinator", what, "choose a port that nothing else uses"))
        self._link.settimeout(None)
        self._seated = True
        for run in (self._read, self._watch):
            threading.Thread(target=run, name="member", daemon=True).start()

    def close(self) -> None:
        """Leave without a word, before the run has begun."""
        self._left = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        if not self._seated:  # or else the thread that reads is the one to close
            self._lines.close()
        self._link.close()

    @contextlib.contextmanager
    def waiting(self, name: str, limit_s: float | None, *, raises: bool = False) -> Iterator[Wait]:
        """Be at a wait; the watching thread ends the process when it is in vain, unless the caller `raises` itself."""
        wait = Wait(name, next(self._orders), time.monotonic(), limit_s, raises)
        self._waits.append(wait)
        self._last = wait
        if limit_s is not None:
            self._report()
        try:
            yield wait
        finally:
            self._waits.remove(wait)

    def exchange(self, name: str, value: Any, limit_s: float | None) -> list[Any]:
        """Every process's value, in their order.

        Raises:
            RunError: a process was lost, failed, or did not arrive within the limit.
        """
        key = f"{next(self._keys)} {name}"
        with self.waiting(name, limit_s, raises=True) as wait:
            self._send({"give": key, "value": value})
            with self._news:
                while key not in self._values:
                    problem = self.verdict(wait)
                    if problem is not None:
                        raise RunError(problem)
                    self._news.wait(BEAT_S / 4)
                return self._values.pop(key)

    def meet(self, key: str, value: Any) -> list[Any]:
        """`exchange` for a thread beside the main one: under a key of its own, for as long as all are alive.

        Raises:
            RunError: a process was lost, or failed.
        """
        self.give(key, value)
        return self.collect(key)

    def give(self, key: str, value: Any) -> None:
        """The first half of `meet`, which does not wait."""
        self._send({"give": key, "value": value})

    def collect(self, key: str) -> list[Any]:
        """The second half: what all gave under this key."""
        beside = Wait(key, 0, time.monotonic(), None, True)
        with self._news:
            problem = None
            while key not in self._values and problem is None:
                problem = self.verdict(beside)
                self._news.wait(BEAT_S / 4)
            if key in self._values:
                return self._values.pop(key)
        time.sleep(GRACE_S)  # this process ends meanwhile, in the words of the main thread or of the one that watches
        assert problem is not None
        raise RunError(problem)

    def missing(self) -> list[int]:
        """Processes that have not arrived at all."""
        return [index for index, row in enumerate(self._table) if row is None]

    def explain(self, limit_s: float) -> Problem | None:
        """What really happened, when this process fails because another one is gone: the news may take a moment."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            problem = self.verdict(self._here, failed_too=True)
            if problem is not None:
                return problem
            time.sleep(BEAT_S / 10)
        return None

    def leave(self, reason: str) -> None:
        """End watching, and tell the others why this process ends; "" for the end of the run."""
        self._left = True
        self._send({"bye": reason})

    def first_failed_alike(self, reason: str, limit_s: float) -> bool:
        """Whether process 0 ends for the same reason, and so says it for all."""
        with self._news:
            return self._news.wait_for(lambda: (self._table[0] or [0, "", ""])[2] == f"failed: {reason}", limit_s)

    def verdict(self, wait: Wait, *, failed_too: bool = False) -> Problem | None:
        """Why `wait` is in vain, or None while it is not."""
        late_s = time.monotonic() - wait.since_s
        waits = wait in self._waits
        missing: list[str] = []
        for index, row in enumerate(self._table):
            name = f"process {index} of {self.count}"
            order, place, end = row or (-1, "", "")
            kind, _, why = end.partition(": ")
            if index == self.process:
                continue
            if kind == "lost":
                return self._problem(f"{name} was lost ({why})", wait)
            if kind == "failed" and self._grace_is_over(failed_too):
                return self._problem(f"{name} stopped: {why}", wait)
            if order < wait.order and waits:
                if kind == "done":
                    return self._problem(f"{name} has ended", wait)
                at = f" (it is at: {place})" if place else ""
                missing.append(f"{name} has not arrived after {late_s:.0f} s{at}")
        if not waits or wait.limit_s is None or late_s <= wait.limit_s:
            return None
        what = "; ".join(missing) or f"all {self.count} processes have arrived, and it is not over after {late_s:.0f} s"
        return self._problem(what, wait)

    def _grace_is_over(self, failed_too: bool) -> bool:
        self._failed_s = self._failed_s or time.monotonic()
        return failed_too or time.monotonic() - self._failed_s > GRACE_S

    def _problem(self, what: str, wait: Wait) -> Problem:
        where = f"process {self.process} of {self.count}"
        state = "waiting at" if wait in self._waits else "after"
        step = None
        with contextlib.suppress(OSError):
            step = self.latest()
        saved = "" if step is None else f"; the last checkpoint is of step {step}"
        return Problem(where, f"{what}; {state}: {wait.name}{saved}", "run the same command to carry on")

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # what breaks the connection is seen by the reader
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _report(self) -> None:
        self._send({"at": [self._last.order, self._last.name]})

    def _read(self) -> None:
        how = "its connection closed"
        try:
            with self._lines:
                for line in self._lines:
                    self._hear(json.loads(line))
        except OSError as error:
            how = f"its connection failed: {error.strerror}"
        self._lose_first(how)

    def _hear(self, message: dict[str, Any]) -> None:
        with self._news:
            self._heard_s = time.monotonic()
            if "table" in message:
                self._table = message["table"]
            else:
                self._values[message["all"]] = message["values"]
            self._news.notify_all()

    def _lose_first(self, how: str) -> None:
        """The register is gone, and process 0 with it."""
        with self._news:
            row = self._table[0] or [0, "", ""]
            if row[2] == "":
                self._table[0] = [row[0], row[1], f"lost: {how}"]
            self._news.notify_all()

    @property
    def _here(self) -> Wait:
        """The innermost wait this process is in, or the last one it was in."""
        return next(reversed(self._waits), self._last)

    def _watch(self) -> None:
        beat_s = 0.0
        while not self._left:
            if time.monotonic() >= beat_s:
                self._report()
                beat_s = time.monotonic() + BEAT_S
            if time.monotonic() - self._heard_s > self.silent_s:
                self._lose_first(f"no sign of life for {self.silent_s:.0f} s")
            with self._news:
                self._news.wait(max(0.0, beat_s - time.monotonic()))
            wait = self._here
            problem = None if wait.raises and wait in self._waits else self.verdict(wait)
            if problem is not None and not self._left:
                if self.process == 0:
                    time.sleep(BEAT_S / 4)  # the register goes with this process: let the others hear first
                self.end(problem)
                return
