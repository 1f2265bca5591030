"""`podling COMMAND`: finds the command, prints its result or its problems, and decides the exit code.

Exit codes: 0 done, 1 it could not be done, 2 the input cannot be used as it is, 130 and 143 stopped by Ctrl-C and
SIGTERM. With `--json` exactly one object goes to stdout, whatever happens; everything else goes to stderr.
"""

import contextlib
import difflib
import functools
import importlib
import io
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from podling import __version__
from podling.errors import InputError, PodlingError, Problem

COMMANDS = {
    "train": ("podling.cli.train", "train a model on text; with no arguments, on text found here"),
    "prepare": ("podling.cli.prepare", "turn text into token shards, before a device is held"),
    "generate": ("podling.cli.generate", "continue a text with a trained model"),
    "evaluate": ("podling.cli.evaluate", "measure a model on held-out text"),
    "export": ("podling.cli.export", "write a model for Hugging Face transformers"),
    "plan": ("podling.cli.plan", "what fits a chip, how fast it will be, and what a session buys"),
    "bench": ("podling.cli.bench", "how fast this machine is at it, and what keeps it from being faster"),
    "mesh": ("podling.cli.mesh", "draw a model on a mesh of devices: which one holds what"),
    "import": ("podling.cli.import_", "read a GPT-2 of Hugging Face transformers"),
    "launch": ("podling.cli.launch", "run a command in several processes that are one run"),
}

HELP = f"""usage: podling COMMAND [OPTIONS]

Train GPT-2-class language models with JAX, from a laptop CPU to a TPU pod.

commands:
{chr(10).join(f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items())}

  podling COMMAND --help    what a command takes
  podling --version         the version

examples:
  podling train                                  a small GPT, on code found here
  podling train --data my_texts/ --model gpt2    GPT-2 on your text
  podling plan --chip v5e-8 --budget 9h          the best model for a session, before it is spent
  podling generate runs/default --prompt "def "  what the model writes
"""


GIVE_UP_S = 5.0
"""Time for a stopped program to unwind. A callback inside JAX can swallow the exception, and then it never would."""


class Terminated(BaseException):
    """SIGTERM came; raised where the program is, so that files are closed and temporary ones removed."""


class Ended(Exception):
    """The command has said all there is to say, and knows its exit code and its JSON object (None: it prints none)."""

    def __init__(self, code: int, result: dict[str, Any] | None):
        super().__init__(code)
        self.code, self.result = code, result


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if argv[0] == "--version":
        print(f"podling {__version__}")
        return 0
    as_json = "--json" in argv and not {"-h", "--help"} & set(argv)
    with _stdout_for_json(as_json) as answer, _stoppable(argv[0], answer):
        global _give_up
        _give_up = functools.partial(_end_at_once, argv[0], answer)
        return _run(argv, answer)


_give_up: Any = None


def end_at_once(problem: Problem) -> None:
    """End the program with exit code 1 from another thread: its main thread hangs where nothing can reach it."""
    _give_up(problem, 1)


def _end_at_once(command: str, answer: Any, problem: Problem, code: int) -> None:
    _fail(command, [problem], code, answer)
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a moving display hides the cursor, and cannot bring it back now
        sys.stderr.flush()
    os._exit(code)


def entry() -> None:
    """The `podling` program: `main`, and an end that nothing can spoil."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character is no reason to stop
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = main()
    except BrokenPipeError:
        code = 0
    hosts = sys.modules.get("podling.hosts.join")
    if code > 128 or (code and hosts is not None and hosts.joined):
        # Stopped by a signal, perhaps while a library was starting its threads: taking the interpreter down in order
        # has been seen to crash then, and there is nothing left to put in order. And where one of several processes
        # fails, JAX would first wait for all the others.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    try:
        sys.stdout.flush()
    except OSError:  # the reader left, as in `podling train | head`: Python would try again, and end with code 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(argv: list[str], answer: Any) -> int:
    """Run the command; `answer` takes the JSON object."""
    try:
        result = _command(argv[0]).main(argv[1:])
    except PodlingError as error:
        return _fail(argv[0], error.problems, error.exit_code, answer)
    except Ended as end:
        if end.result is not None:
            answer(end.result)
        return end.code
    except SystemExit as stop:  # a printed help text
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail(argv[0], [_stopped_by(signal.SIGINT)], 128 + signal.SIGINT, answer)
    except Terminated:
        return _fail(argv[0], [_stopped_by(signal.SIGTERM)], 128 + signal.SIGTERM, answer)
    except BrokenPipeError:  # the reader left, as in `podling generate RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        traceback.print_exc()
        problem = Problem("podling", f"{type(error).__name__}: {error}", "not foreseen: the traceback tells where")
        return _fail(argv[0], [problem], 1, answer)
    answer(result)
    return 0


def _command(name: str) -> Any:
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0])
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    kind = "flag" if name.startswith("-") else "command"
    fix = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
    raise InputError(Problem(name, f"podling has no such {kind}", fix))


def _fail(command: str, problems: list[Problem], code: int, answer: Any) -> int:
    count = f", {len(problems)} problems" if len(problems) > 1 else ""
    with contextlib.suppress(BrokenPipeError):
        if problems:  # one of several processes leaves it to the first
            print(f"podling {command}: stopped{count}", file=sys.stderr)
        for problem in problems:
            print("  " + str(problem).replace("\n", "\n  "), file=sys.stderr)
    answer({"error": {"problems": [vars(problem) for problem in problems]}, "exit_code": int(code)})
    return int(code)


@contextlib.contextmanager
def _stdout_for_json(as_json: bool) -> Iterator[Any]:
    """Keep stdout for one JSON object: what anything else writes there goes to stderr, C libraries included.

    Yields:
        A function that takes the object; it does nothing unless `as_json`.
    """
    if not as_json:
        yield lambda result: None
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def answer(result: Any) -> None:
        sys.stdout.flush()
        text = json.dumps(_finite(result), ensure_ascii=False, allow_nan=False) + "\n"
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            out.write(text)

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@contextlib.contextmanager
def _stoppable(command: str, answer: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM unwind the program; when a library swallows that, the program ends all the same.

    At once where Python tells of it: what a callback raises (of the garbage collector, of JAX) goes to
    `sys.unraisablehook` and no further. At once during an import too: extension modules that are being loaded answer
    an exception with a crash. After `GIVE_UP_S` where nobody tells.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        if _importing(frame):
            end(signum)
        if not timers:
            timers.append(threading.Timer(GIVE_UP_S, end, (signum,)))
            timers[0].daemon = True
            timers[0].start()
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated

    def end(signum: int) -> None:
        _end_at_once(command, answer, _stopped_by(signum), 128 + signum)

    def swallowed(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt | Terminated):
            end(signal.SIGINT if issubclass(unraisable.exc_type, KeyboardInterrupt) else signal.SIGTERM)
        hook_before(unraisable)

    timers: list[threading.Timer] = []
    hook_before, sys.unraisablehook = sys.unraisablehook, swallowed
    ignored = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is signal.SIG_IGN]
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM) if n not in ignored}
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = hook_before
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: Any) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _stopped_by(signum: int) -> Problem:
    return Problem("interrupted", "stopped by Ctrl-C" if signum == signal.SIGINT else "stopped by SIGTERM")
