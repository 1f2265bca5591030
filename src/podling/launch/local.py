"""Several processes on this machine, joined over loopback: how a run of many hosts is tried and tested on one."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from podling.launch.child import LAUNCHER

PROGRAM = (sys.executable, "-m", "podling")
STOP_S = 10.0
"""When one has failed, the others hear of it and end by themselves. When for so long none has, those left are stopped.
"""
END_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Processes:
    """The processes of one command.

    Attributes:
        children: by their number.
        code: the first exit code that was not 0; 1 for a process that died.
    """

    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    code: int = 0
    signalled: int | None = None
    pressed: int = 0  # how often those that did not stop were told to
    cause: str = ""  # of the first death that was not the launcher's doing
    ended: set[int] = field(default_factory=set)
    aborts: dict[int, list[str]] = field(default_factory=dict)  # what C++ said before it aborted a process

    def wait(self) -> None:
        """Until all have ended, by themselves or because one of them did."""
        news_s = time.monotonic()
        while len(self.ended) < len(self.children):
            new = [n for n, child in enumerate(self.children) if n not in self.ended and child.poll() is not None]
            for number in sorted(new, key=lambda number: self.children[number].returncode == -signal.SIGABRT):
                self.ended.add(number)
                self._judge(number, self.children[number].returncode)
                news_s = time.monotonic()
            if self.code and self.signalled is None:
                self._press(time.monotonic() - news_s)
            time.sleep(0.05)

    def _judge(self, number: int, code: int) -> None:
        if code < 0 and -code != self.signalled:
            name = signal.Signals(-code).name
            died = f"process {number} of {len(self.children)} was killed by {name}"
            say(died)
            if not self.pressed:
                self.cause = self.cause or died
            # Gloo aborts a process that goes on with a peer gone, and asks for a mistake in the program.
            if not self.code:
                _print_marked(number, self.aborts.get(number, []))
        self.code = self.code or (code if code >= 0 else 128 - code if -code == self.signalled else 1)

    def _press(self, since_s: float) -> None:
        """Stop what does not stop by itself: one has failed, and since the last one ended `since_s` have passed."""
        limits = ((STOP_S, signal.SIGTERM), (STOP_S + END_S, signal.SIGKILL))
        left = [str(number) for number, child in enumerate(self.children) if child.poll() is None]
        if left and self.pressed < len(limits) and since_s > limits[self.pressed][0]:
            number = limits[self.pressed][1]
            self.pressed += 1
            say(f"process {', '.join(left)} did not end within {since_s:.0f} s of the others: {number.name}")
            self.send(number)

    def send(self, number: int) -> None:
        """A signal to every process that is there."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)


def say(text: str) -> None:
    """A line of the launcher itself."""
    print(f"podling launch: {text}", file=sys.stderr, flush=True)


def run_local(command: list[str], processes: int, devices: int) -> tuple[int, dict[str, Any] | None]:
    """Run `podling COMMAND` in several processes and wait for them.

    Process 0 prints as if it were alone; each line of the others is marked with its number and goes to stderr.

    Args:
        command: the command and its arguments.
        processes: how many, at least 1.
        devices: emulated CPU devices of each.

    Returns:
        The exit code, and with `--json` the object that process 0 printed, or one about its death.
    """
    as_json = "--json" in command
    port = _free_port()
    alive, held = os.pipe()
    all_ = Processes()
    readers: list[threading.Thread] = []
    answer: list[str] = []
    with _forwarding(all_):
        for number in range(processes):
            flags = [
                "--coordinator",
                f"127.0.0.1:{port}",
                "--num-processes",
                str(processes),
                "--process-id",
                str(number),
            ]
            own = [word for word in command if word != "--json" or number == 0]
            child = subprocess.Popen(
                [*PROGRAM, *own, *(flags if processes > 1 else [])],
                env=_environment(devices, alive),
                pass_fds=(alive,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if number or as_json else None,
                stderr=subprocess.STDOUT if number else None,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the launcher alone, which passes it on once
            )
            all_.children.append(child)
            if child.stdout is not None:
                target, args = (_mark, (child.stdout, number, all_)) if number else (_keep, (child.stdout, answer))
                readers.append(threading.Thread(target=target, args=args, daemon=True))
                readers[-1].start()
        os.close(alive)
        all_.wait()
    for reader in readers:
        reader.join(timeout=5)
    os.close(held)
    return all_.code, _answer("".join(answer), all_) if as_json else None


def _answer(text: str, all_: Processes) -> dict[str, Any]:
    """What process 0 printed, and before it what only the launcher knows: that a process was killed, and how."""
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        answer = json.loads(text)
    if answer and "error" not in answer:
        return answer
    problems = answer.get("error", {}).get("problems", [])
    if all_.cause:
        fix = "run the same command to carry on"
        problems = [{"where": "podling launch", "what": all_.cause, "fix": fix}, *problems]
    elif all_.signalled and not problems:
        by = "Ctrl-C" if all_.signalled == signal.SIGINT else signal.Signals(all_.signalled).name
        problems = [{"where": "interrupted", "what": f"stopped by {by}", "fix": ""}]
    elif not problems:
        what = "ended without an answer; what it said is on stderr"
        fix = "run the same command to carry on"
        problems = [{"where": f"process 0 of {len(all_.children)}", "what": what, "fix": fix}]
    return {"error": {"problems": problems}, "exit_code": all_.code}


def _mark(lines: IO[bytes], number: int, all_: Processes) -> None:
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        if text.startswith(("terminate called after", "  what():  ")):
            all_.aborts.setdefault(number, []).append(text)
        else:
            _print_marked(number, [text])


def _print_marked(number: int, lines: list[str]) -> None:
    for line in lines:
        sys.stderr.write(f"[{number}] {line}\n")
    sys.stderr.flush()


def _keep(lines: IO[bytes], kept: list[str]) -> None:
    kept.extend(line.decode(errors="replace") for line in lines)


@contextlib.contextmanager
def _forwarding(all_: Processes) -> Iterator[None]:
    """Signals go to every process, which saves and ends; the launcher waits for that."""

    def forward(number: int, frame: Any) -> None:
        all_.signalled = number
        all_.send(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _environment(devices: int, alive: int) -> dict[str, str]:
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    chosen = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": flags,
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(alive),
    }
    return {**os.environ, **chosen}
