"""podling itself in several processes, one of which is killed: what is said, and that the same command carries on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TRAIN = (
    "train --data text.txt --out run --steps 100000 --model.layers 1 --model.embed 32 --model.heads 2 --context 32 "
    "--batch-tokens 256 --tokenizer bytes --checkpoint-every 20"
)


class Launched:
    """A launched run, with all it says in a file."""

    def __init__(self, folder: Path, name: str, processes: int, devices: int):
        self.output = folder / name
        where = f"local --processes {processes} --devices-per-process {devices}"
        line = [sys.executable, "-m", "podling", "launch", *where.split(), "--", *TRAIN.split()]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(line, cwd=folder, stdout=file, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.output.read_text()

    def until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not holds():
            assert self.process.poll() is None and time.monotonic() < until, self.said
            time.sleep(0.05)

    def pid_of(self, number: int) -> int:
        """Of a child, by its arguments."""
        found = [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if _parent(path) == self.process.pid and _arguments(path)[-2:] == ["--process-id", str(number)]
        ]
        assert len(found) == 1, found
        return found[0]

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _arguments(path: Path) -> list[str]:
    try:
        return (path / "cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_one_is_killed_the_others_say_so_and_the_same_command_carries_on(tmp_path: Path, victim: int) -> None:
    text = "\n\n".join(f"number {n} of the sheep jumps over the lazy dog, {n * n} times" for n in range(300))
    (tmp_path / "text.txt").write_text(text)
    checkpoints = tmp_path / "run" / "checkpoints"
    with Launched(tmp_path, "killed.txt", processes=2, devices=1) as run:
        run.until(lambda: any(path.name.isdecimal() for path in checkpoints.glob("*")))
        os.kill(run.pid_of(victim), signal.SIGKILL)
        killed_s = time.monotonic()
        assert run.process.wait(timeout=60) == 1
        assert time.monotonic() - killed_s < 60
        said = run.said
    other = 1 - victim
    assert f"podling launch: process {victim} of 2 was killed by SIGKILL" in said
    assert f"process {other} of 2: process {victim} of 2 was lost (its connection" in said
    assert "the last checkpoint is of step " in said and "run the same command to carry on" in said
    assert "Traceback" not in said and "gloo" not in said.lower() and "coordination" not in said

    if victim == 1:  # once is enough
        return
    with Launched(tmp_path, "carried_on.txt", processes=1, devices=2) as run:
        run.until(lambda: "resuming after step " in run.said and "  loss " in run.said)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(timeout=60) == 128 + signal.SIGTERM
        assert "stopped by a signal; everything up to here is saved" in run.said
