"""A run that is killed again and again ends bit-equal to one that was left in peace.

The parent watches what any person could watch (the lines printed, the metrics, the checkpoint folder) and kills then;
the program has no hooks for it.
"""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from podling.config import from_dict
from podling.files import read_json
from podling.parallel.mesh import make_mesh
from podling.run.checkpoint import Checkpoints, hash_state
from podling.run.metrics import read_records
from podling.train.step import init_state

STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 60, 6, 20
PATIENCE_S = 120
# Runs the command that follows with files limited to 1 MB.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words from a small made-up vocabulary: enough for a tokenizer and a held-out tail."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(60)]
    lines = [" ".join(draw.choices(words, k=12)) + "." for _ in range(2000)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path


@dataclass
class Trainer:
    """Starts sessions of `podling train`, always the same command but for the run folder."""

    text: Path
    cache: Path

    def command(self, out: Path, *more: str) -> list[str]:
        flags = {
            "--data": self.text,
            "--out": out,
            "--model": "gpt2-nano",
            "--context": 32,
            "--vocab-size": 300,
            "--batch-tokens": 128,
            "--steps": STEPS,
            "--checkpoint-every": CHECKPOINT_EVERY,
            "--eval-every": EVAL_EVERY,
            "--train.samples": 0,
            "--run.log-every": 1,
        }
        listed = [str(part) for pair in flags.items() for part in pair]
        return [sys.executable, "-m", "podling", "train", *listed, "--run.no-tensorboard", *more]

    def start(self, out: Path, *more: str, before: Sequence[str] = ()) -> subprocess.Popen:
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "XDG_CACHE_HOME": str(self.cache)}
        command = [*before, *self.command(out, *more)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def to_the_end(self, out: Path, *more: str) -> str:
        process = self.start(out, *more)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        return said


@pytest.fixture(scope="module")
def trainer(text, tmp_path_factory):
    return Trainer(text, tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def unbroken(trainer, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    trainer.to_the_end(out)
    return out


def outcome(out: Path) -> dict:
    """Everything that must not depend on how often the run was stopped."""
    config = from_dict(read_json(out / "config.json"), "config.json")
    with jax.set_mesh(make_mesh("data=1", jax.devices()[:1])):
        shapes = jax.eval_shape(lambda: init_state(config))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    checkpoints = Checkpoints(out / "checkpoints")
    state, meta = checkpoints.restore(None, like, pytest.fail)
    checkpoints.close()
    assert meta["step"] == STEPS
    records, broken = read_records(out / "metrics.jsonl")
    assert not broken
    return {
        "state": hash_state(state),
        "export": hashlib.sha256((out / "export" / "model.safetensors").read_bytes()).hexdigest(),
        "losses": [(record["step"], record["loss"]) for record in records if "loss" in record],
        "heldout": [(record["step"], record["val_loss"]) for record in records if "val_loss" in record],
    }


def without_evaluation(result: dict, step: int) -> dict:
    return result | {"heldout": [pair for pair in result["heldout"] if pair[0] != step]}


def wait_for(process: subprocess.Popen, moment: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not moment():
        if process.poll() is not None:
            pytest.fail(f"ended before {what}:\n{process.stdout.read()}")
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.0005)


def last_step(out: Path) -> int:
    try:
        lines = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines[-3:]), default=0)


def writing_step(out: Path) -> int:
    """The step whose checkpoint is being written at this moment, or 0."""
    names = [path.name for path in (out / "checkpoints").glob("*.partial")]
    return max((int(name.split(".")[0]) for name in names if name.count(".") == 1), default=0)


def complete_steps(out: Path) -> list[int]:
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdecimal())


def kill_at(trainer: Trainer, out: Path, kind: str, step: int) -> bool:
    """Run until the moment comes, kill -9, and tell whether the kill landed in it."""
    process = trainer.start(out)
    if kind == "save":
        wait_for(process, lambda: writing_step(out) >= step, f"the checkpoint of step {step}")
    elif kind == "step":
        wait_for(process, lambda: last_step(out) >= step, f"step {step}")
    else:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith(kind) and last_step(out) >= step:
                break
        else:
            pytest.fail(f"ended before {kind}:\n{''.join(seen)}")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    if kind == "save":
        return writing_step(out) >= step
    if kind == "evaluating":
        records, _ = read_records(out / "metrics.jsonl")
        return last_step(out) == step and not any(r["step"] == step and "val_loss" in r for r in records)
    return True


@pytest.mark.slow
def test_ten_kills_leave_the_run_bit_equal_to_an_unbroken_one(trainer, unbroken, tmp_path):
    out = tmp_path / "killed"
    kills = [
        ("compiling", 0),
        ("step", 3),
        ("save", 6),
        ("save", 12),
        ("evaluating", 20),
        ("step", 27),
        ("save", 30),
        ("evaluating", 40),
        ("save", 48),
        ("step", 58),
    ]
    landed = [kind for kind, step in kills if kill_at(trainer, out, kind, step)]
    assert landed.count("save") >= 3, "the kills came too late to hit a checkpoint being written"
    assert landed.count("evaluating") >= 1
    said = trainer.to_the_end(out)
    resumed = re.search(r"resuming after step (\d+) of", said)
    assert resumed and int(resumed[1]) in range(42, 55), "the last session must have started from a late checkpoint"
    assert outcome(out) == outcome(unbroken)
    assert [step for step, _ in outcome(out)["losses"]] == list(range(1, STEPS + 1))
    assert not list((out / "checkpoints").glob("*.partial"))


@pytest.mark.slow
def test_signals_save_damage_falls_back_and_limits_hurt_nothing(trainer, unbroken, tmp_path):
    out = tmp_path / "stopped"
    # Ctrl-C saves and exits with 130; meanwhile nobody else can write.
    process = trainer.start(out)
    wait_for(process, lambda: last_step(out) >= 8, "step 8")
    os.kill(process.pid, signal.SIGSTOP)
    other = subprocess.run(trainer.command(out), capture_output=True, text=True, timeout=PATIENCE_S)
    assert other.returncode == 2 and f"being written by process {process.pid}" in other.stderr
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said and f"podling train --resume {out}" in said
    stopped = max(complete_steps(out))
    assert stopped >= 8 and stopped == last_step(out)

    # The file-size limit stops the next save: exit code 1, one sentence, and what was saved stays.
    process = trainer.start(out, before=[sys.executable, "-c", LIMITED])
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    assert "File too large" in said and "Traceback" not in said
    assert f"the checkpoint of step {stopped} is intact" in said
    assert max(complete_steps(out)) == stopped

    # SIGTERM saves and exits with 143.
    process = trainer.start(out)
    wait_for(process, lambda: last_step(out) >= 30, "step 30")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, said

    # One flipped bit in the newest checkpoint: said, and the one before is used.
    steps = complete_steps(out)
    newest = max((out / "checkpoints" / str(steps[-1])).rglob("*"), key=lambda path: path.stat().st_size)
    bad = bytearray(newest.read_bytes())
    bad[len(bad) // 2] ^= 4
    newest.write_bytes(bad)
    said = trainer.to_the_end(out)
    assert re.search(rf"checkpoints/{steps[-1]}: checkpoint is damaged: .*{newest.name}", said)
    assert f"resuming after step {steps[-2]} of {STEPS}" in said
    # A session that is asked to stop at a step whose evaluation is due stops; nothing else may differ.
    assert without_evaluation(outcome(out), stopped) == without_evaluation(outcome(unbroken), stopped)

    # Finished: the same command prints the summary and does nothing else; another configuration is refused.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "lock"}
    assert "finished" in trainer.to_the_end(out)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    other = subprocess.run(trainer.command(out, "--lr", "0.5"), capture_output=True, text=True, timeout=PATIENCE_S)
    assert other.returncode == 2 and "--lr: 0.0" in other.stderr and "→ 0.5" in other.stderr
