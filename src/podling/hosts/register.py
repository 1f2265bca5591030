"""The register that process 0 keeps: which processes there are, where each of them is, what each told all.

It speaks JSON, one object a line, over TCP. It needs no JAX: it is there before JAX starts, answers while JAX hangs,
and knows by name who is missing, which a collective does not.

    anybody → register   {"whose": ""}, answered with the same and a word that only this register knows
    process → register   {"hello": 3, "count": 4, "who": "host, process id 123"}, {"at": [7, "first step"]},
                         {"give": "2 mesh", "value": ...}, {"bye": "" or what went wrong}
    register → process   {"welcome": 4}, {"refused": [where, what, fix]}, {"table": [[7, "first step", ""], null, ...]},
                         {"all": "2 mesh", "values": [...]}
"""

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

SILENT_S = 25.0
"""After this long without a sign of life a process counts as lost: many missed beats, so a busy machine is no loss, and
short of the minute in which all have ended."""
SEND_S = 5


@dataclass
class Seat:
    """One process, as the register knows it."""

    who: str
    link: socket.socket
    heard_s: float
    order: int = 0  # how many waits it has entered
    name: str = ""  # of the last one
    end: str = ""  # "" alive, "done", "failed: why", "lost: how"
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        """A process that does not listen is noticed by its silence."""
        with self.sending, contextlib.suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b"\n")


class Register:
    """Answers connections on threads of its own until the process ends.

    Args:
        listener: bound and listening.
        count: of processes in the run.
        silent_s: how long a process may send nothing.
    """

    def __init__(self, listener: socket.socket, count: int, silent_s: float = SILENT_S):
        self.listener, self.count, self.silent_s = listener, count, silent_s
        self.word = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._seats: dict[int, Seat] = {}
        self._given: dict[str, dict[int, Any]] = {}
        threading.Thread(target=self._accept, name="register", daemon=True).start()

    def close(self, limit_s: float) -> None:
        """Let the others leave first, for so long."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            with self._lock:
                if all(seat.end for process, seat in self._seats.items() if process):
                    break
            time.sleep(0.02)
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self.listener.accept()
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
                threading.Thread(target=self._serve, args=(link,), name="register", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        process = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), link, link.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "hello" in message:
                    process = self._seat(message, link)
                    if process is None:
                        return
                elif "whose" in message:
                    link.sendall(json.dumps({"whose": self.word}).encode() + b"\n")
                elif process is not None:
                    self._hear(process, message)
        if process is not None:
            with self._lock:
                self._seats[process].end = self._seats[process].end or "lost: its connection closed"
            self._tell_table()

    def _seat(self, message: dict[str, Any], link: socket.socket) -> int | None:
        process, count = message["hello"], message["count"]
        seat = Seat(message["who"], link, time.monotonic())
        with self._lock:
            held = self._seats.get(process)
            if count != self.count:
                what = f"is {count} here, and process 0 was started with {self.count}"
                refused = ["--num-processes", what, "give every process the same"]
            elif held is not None:
                what = f"process {process} is here already ({held.who}); this one is {seat.who}"
                refused = ["--process-id", what, f"number them 0 to {self.count - 1}, each once"]
            else:
                self._seats[process] = seat
                seat.send({"welcome": self.count})
                return process
        seat.send({"refused": refused})
        return None

    def _hear(self, process: int, message: dict[str, Any]) -> None:
        with self._lock:
            seat = self._seats[process]
            seat.heard_s = time.monotonic()
            if "at" in message:
                seat.order, seat.name = message["at"]
        if "give" in message:
            self._give(process, message["give"], message["value"])
        elif "bye" in message:
            seat.end = f"failed: {message['bye']}" if message["bye"] else "done"
            self._tell_table()
        elif self._notice_silence():
            self._tell_table()
        else:
            seat.send({"table": self._table()})

    def _give(self, process: int, key: str, value: Any) -> None:
        with self._lock:
            given = self._given.setdefault(key, {})
            given[process] = value
            if len(given) < self.count:
                return
            del self._given[key]
            seats = list(self._seats.values())
        values = [given[index] for index in range(self.count)]
        for seat in seats:
            seat.send({"all": key, "values": values})

    def _notice_silence(self) -> bool:
        """Whether a process has just been silent for too long."""
        now = time.monotonic()
        with self._lock:
            silent = [seat for seat in self._seats.values() if not seat.end and now - seat.heard_s > self.silent_s]
            for seat in silent:
                seat.end = f"lost: no sign of life for {self.silent_s:.0f} s"
        return bool(silent)

    def _table(self) -> list[list[Any] | None]:
        with self._lock:
            seats = [self._seats.get(index) for index in range(self.count)]
            return [None if seat is None else [seat.order, seat.name, seat.end] for seat in seats]

    def _tell_table(self) -> None:
        table = self._table()
        with self._lock:
            seats = [seat for seat in self._seats.values() if not seat.end.startswith("lost")]
        for seat in seats:
            seat.send({"table": table})
