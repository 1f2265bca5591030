"""How soon a session trains: the first one of a run (cold), and the next one, which finds the compiled programs (warm).

    python bench/warm_start.py                         the default job
    python bench/warm_start.py --rounds 3 -- --model gpt2-nano --data book.txt
    python bench/warm_start.py --rounds 1 -- --model gpt2 --context 64 --batch-tokens 256 --data tokens/

`podling train` is started in a new folder and stopped by SIGTERM after its first step, as a cut session is; then
the same command goes on. Both are processes of their own, timed from outside their interpreter:

- first call: tracing, compiling (or reading the program) and running the first step;
- whole start: from the start of the process to the end of the first step, the prediction of the step's time included.

What follows `--` goes to `podling train`. The text is prepared before anything is timed.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOST = {"first call": 0.3, "whole start": 0.6}
"""Of the cold one."""


def main() -> None:
    if sys.argv[1:2] == ["--session"]:
        session(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("train", nargs="*", help="arguments of podling train")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        cache = [] if "--data" in args.train else ["--data.cache", folder + "/prepared"]
        subprocess.run([sys.executable, "-m", "podling", "prepare", *cache, *data_flags(args.train)], check=True)
        for number in range(args.rounds):
            for name in found:
                found[name].append(timed(Path(folder) / f"run{number}", [*args.train, *cache]))
    if args.json:
        print(json.dumps(found))
        return
    for part, most in MOST.items():
        cold, warm = ([each[part] for each in found[name]] for name in ("cold", "warm"))
        ratio = statistics.median(warm) / statistics.median(cold)
        print(f"{part}: cold {spread(cold)}, warm {spread(warm)}: {ratio:.2f}, at most {most}: {met(ratio <= most)}")
    for name, each in found.items():
        stages = {stage: statistics.median(one[stage] for one in each) for stage in each[0]}
        print(f"{name}: " + ", ".join(f"{stage} {took_s:.2f} s" for stage, took_s in stages.items()))


def data_flags(train: list[str]) -> list[str]:
    """Those of `podling train` that decide what is prepared."""
    known = ("--data", "--tokenizer", "--vocab-size", "--data.holdout", "--model")
    return [word for at, flag in enumerate(train) if flag in known for word in train[at : at + 2]]


def timed(out: Path, train: list[str]) -> dict[str, float]:
    """One session, stopped after its first step; seconds of its parts."""
    told = out.with_suffix(".json")
    command = [sys.executable, __file__, "--session", str(told), str(time.time()), *train, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 128 + signal.SIGTERM:
        raise SystemExit(f"podling train ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(told.read_text())


def session(told: Path, began_s: float, train: list[str]) -> None:
    """`podling train` in this process, with a clock at the places that are asked about.

    Args:
        told: gets the times.
        began_s: when the process was started, on `time.time`.
        train: arguments of `podling train`.
    """
    from podling.cli.main import main as podling
    from podling.train import start

    marks: dict[str, float] = {}
    open_folder = start._open_folder

    def with_clocks(*args: Any) -> Any:
        from podling.train import loop, prediction

        marks["arguments and data"] = time.time() - began_s
        clock(prediction, "_compile", marks, "compiling")
        clock(prediction, "foretell", marks, "predicting")
        clock(loop, "open_session", marks, "devices")
        clock(loop, "first_state", marks, "state")
        clock(loop.Run, "first_step", marks, "first step")
        first_step = loop.Run.first_step

        def first_and_last(self: Any, *args: Any) -> Any:
            state = first_step(self, *args)
            marks["whole start"] = time.time() - began_s
            marks["first call"] = marks["compiling"] + marks["first step"]
            told.write_text(json.dumps(marks))
            os.kill(os.getpid(), signal.SIGTERM)
            return state

        loop.Run.first_step = first_and_last  # pyright: ignore[reportAttributeAccessIssue]
        return open_folder(*args)

    start._open_folder = with_clocks
    sys.exit(podling(["train", *train]))


def clock(owner: Any, name: str, marks: dict[str, float], label: str) -> None:
    """Wrap a function so that what it takes is noted."""
    function = getattr(owner, name)

    def timed_function(*args: Any, **more: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            marks[label] = time.perf_counter() - began_s

    setattr(owner, name, timed_function)


def spread(seconds: list[float]) -> str:
    """'3.21 s (3.10 to 3.40)'."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def met(is_met: bool) -> str:
    """In words."""
    return "met" if is_met else "missed"


if __name__ == "__main__":
    main()
