"""bench/cpu_training.py: its talk with workers, and what it concludes from their times."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    monkeypatch.syspath_prepend(str(BENCH))
    import cpu_training

    return cpu_training


def rows(name: str, call: str, times: list[float], **changed: Any) -> list[dict]:
    facts = {"call": call, "work": "char", "name": name, "clip": 1.0, "first_loss": 4.17, "whole_peak_bytes": 10**8}
    return [
        {**facts, "loss": 3.0, "peak_bytes": 10**8, "others": 0.0, "cores": 2.0, "step_s": s, **changed} for s in times
    ]


def everyone(harness: Any, ours: list[dict], theirs_s: float) -> list[dict]:
    return ours + [row for index, name in enumerate(harness.PEERS) for row in rows(name, "a", [theirs_s + index])]


def test_met_against_the_fastest_peer(harness):
    work = harness.WORKS["char"]
    text = harness.table(work, everyone(harness, rows("podling", "a", [0.9, 1.0, 1.1]), 1.2), {})
    assert "against nanogpt, the fastest peer: 1.20x tokens/s (target 1.15x), memory 1.00x: met" in text
    podling = next(line for line in text.splitlines() if line.startswith("podling"))
    assert podling.split()[1:6] == ["1000.00", "900.00", "1100.00", "3", "768"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"step_s": 1.1}, "1.09x is below 1.15x"),
        ({"peak_bytes": 1.3e8}, "memory 1.30x is above 1.2x"),
        ({"loss": 4.2}, "podling does not learn: 4.170, then 4.200"),
        ({"loss": float("nan")}, "podling does not learn"),
        ({"first_loss": 5.0}, "podling's first loss is 5.000, an untrained model's 4.174"),
        ({"first_loss": float("nan"), "loss": 1.0}, "podling's first loss is nan"),
    ],
)
def test_not_met(harness, changed, why):
    text = harness.table(
        harness.WORKS["char"], everyone(harness, rows("podling", "a", [1.0], **changed), 1.2), {}
    ).splitlines()[-1]
    assert "not met" in text and why in text


def test_a_skipped_peer_is_not_met_unless_another_call_had_it(harness):
    work, missing = harness.WORKS["char"], {"llmc": "no --peer llmc=DIR"}
    found = [row for row in everyone(harness, rows("podling", "a", [1.0]), 1.2) if row["name"] != "llmc"]
    text = harness.table(work, found, missing)
    assert "skipped: no --peer llmc=DIR" in text and text.endswith("not met (llmc was skipped)")
    found += rows("podling", "b", [2.0]) + rows("llmc", "b", [5.0])
    assert harness.table(work, found, missing).endswith("met")
    assert "no peer was measured beside podling: not met" in harness.table(work, rows("podling", "a", [1.0]), {})


def test_a_ratio_is_of_calls_that_had_both(harness):
    """The machine was twice as slow in the second call: that is nobody's speed-up."""
    found = rows("podling", "a", [1.0]) + rows("nanogpt", "a", [1.3])
    found += rows("podling", "b", [2.0]) + rows("transformers", "b", [2.8])
    text = harness.table(harness.WORKS["char"], found, {})
    assert "against nanogpt, the fastest peer: 1.30x" in text
    line = next(line for line in text.splitlines() if line.startswith("transformers"))
    assert "1.40x" in line


def test_samples_beside_other_work_do_not_count_if_there_are_better_ones(harness):
    found = rows("podling", "a", [1.0]) + rows("podling", "a", [9.0, 9.0, 9.0], others=0.5)
    found += rows("nanogpt", "a", [2.0], others=0.2)
    text = harness.table(harness.WORKS["char"], found, {})
    assert "against nanogpt, the fastest peer: 2.00x" in text
    assert "3 of 4 samples beside other work; left out" in text
    assert "1 of 1 samples beside other work; there are no others: not to be relied on" in text


WORKER = """
import sys, time
sys.path.insert(0, {peers!r})
from work import Work, keep_stdout, serve
work = Work.load({spec!r})
say = keep_stdout()
print("what a library prints is not an answer")
def run(count):
    if count > 50:
        sys.exit("this worker had enough")
    time.sleep(0.01 * count)
    return 3.0 + count
serve(work, run, say, kind="test")
"""


def test_a_worker_is_timed(harness, tmp_path):
    work = dataclasses.replace(harness.WORKS["char"], tokens="none", warmup_steps=3)
    work.save(tmp_path / "work.json")
    code = WORKER.format(peers=str(BENCH / "peers"), spec=str(tmp_path / "work.json"))
    worker = harness.Worker.start("test", [sys.executable, "-c", code], {}, tmp_path / "log")
    try:
        assert worker.ready() == ""
        assert (worker.about["first_loss"], worker.about["kind"]) == (4.0, "test")
        assert 0.01 <= worker.about["warm_step_s"] < 1
        assert worker.whole_peak_bytes > 10**6
        worker.fit(0.04)
        assert 1 <= worker.steps <= 4
        worker.sample(time.perf_counter())
        (sample,) = worker.samples
        assert sample["loss"] == 3.0 + worker.steps and 0.01 <= sample["step_s"] < 1
        assert sample["peak_bytes"] > 10**6
        worker.steps = 51
        with pytest.raises(SystemExit, match="test ended: .*this worker had enough"):
            worker.sample(time.perf_counter())
    finally:
        worker.end()


def test_a_worker_that_does_not_start(harness, tmp_path):
    worker = harness.Worker.start(
        "test", [sys.executable, "-c", "raise OSError('no such thing')"], {}, tmp_path / "log"
    )
    assert "no such thing" in worker.ready()
    began_s = time.perf_counter()
    worker.end()
    assert time.perf_counter() - began_s < 5


def test_tokens_are_learnable_and_within_the_vocabulary(harness, tmp_path):
    work = harness.WORKS["char"]
    harness.write_tokens(work, tmp_path / "tokens.bin")
    tokens = np.fromfile(tmp_path / "tokens.bin", np.int32)
    assert tokens.size == 8 * 12 * 65 and tokens.min() >= 0 and tokens.max() < 65
    shares = np.bincount(tokens, minlength=65) / tokens.size
    assert -(shares[shares > 0] * np.log(shares[shares > 0])).sum() < np.log(65) - 0.5


def test_the_c_worker_without_a_compiler_or_a_checkout(harness, tmp_path, monkeypatch):
    assert harness.build_llmc(tmp_path, tmp_path / "llmc")  # says what is missing
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
    assert harness.build_llmc(tmp_path, tmp_path / "llmc") == "there is no gcc"
