"""Several real processes over loopback: the same run as one, stopped by a signal to any of them, refused together."""

import dataclasses
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import PATIENCE_S, end, run, start

from podling.run.metrics import read_records

STEPS = 9
# Runs the command that follows with files limited to 2 kB.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
os.execv(sys.argv[1], sys.argv[1:])
"""


def curve(out: Path, field: str = "loss") -> list[tuple[int, float]]:
    records, broken = read_records(out / "metrics.jsonl")
    assert not broken
    return [(record["step"], record[field]) for record in records if field in record]


def wait_for_step(out: Path, step: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while not any(done >= step for done, _ in (curve(out) if (out / "metrics.jsonl").exists() else [])):
        assert time.monotonic() < until, f"step {step} did not come"
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_one_and_four_are_one_run(whole, make_run, tmp_path):
    """Stopped by a signal to the second of two, then alone, ended by four: the curve is that of one process."""
    out = tmp_path / "run"
    steps = {"steps": STEPS, "samples": 2}
    first = make_run(out, mesh="data=2,tensor=2", train=steps, run={"out": str(out), "export": True})
    processes = start(tmp_path, [first] * 2, devices=2)
    wait_for_step(out, 2)
    processes[1].send_signal(signal.SIGTERM)
    ended = end(tmp_path, processes)
    assert [one.code for one in ended] == [143, 143], [one.said for one in ended]
    stopped = curve(out)[-1][0]
    assert (out / "checkpoints" / str(stopped)).is_dir() and not list(out.glob("checkpoints/*.partial"))
    assert "Traceback" not in ended[0].said + ended[1].said
    assert "step" not in ended[1].answer and "loss" not in ended[1].said, "only the first process reports"

    mesh = {"out": str(out), "export": True, "mesh": "fsdp=2"}
    processes = start(tmp_path, [dataclasses.replace(first, run=dataclasses.replace(first.run, **mesh))], devices=2)
    wait_for_step(out, stopped + 1)
    processes[0].send_signal(signal.SIGTERM)
    (ended,) = end(tmp_path, processes)
    assert ended.code == 143 and f"resuming after step {stopped} of {STEPS}" in ended.said, ended.said

    mesh["mesh"] = "data=2,fsdp=2"
    last = dataclasses.replace(first, run=dataclasses.replace(first.run, **mesh))
    ended = run(tmp_path, last, 4, devices=1)
    assert [one.code for one in ended] == [0] * 4, [one.said for one in ended]
    assert "number of processes changed: 1 → 4" in ended[0].said
    assert [one.answer for one in ended[1:]] == [{}] * 3

    wanted = whole.summary
    assert [step for step, _ in curve(out)] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(curve(out), curve(Path(whole.config.run.out)), rtol=1e-4)
    assert ended[0].answer["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-4)
    assert ended[0].answer["bigram_loss"] == wanted["bigram_loss"]
    assert (out / "export" / "model.safetensors").is_file() and len(list((out / "samples").iterdir())) == 2


def test_processes_of_another_configuration_or_other_data_are_refused(make_run, tmp_path):
    one = make_run(tmp_path / "run")
    other = dataclasses.replace(one, optimizer=dataclasses.replace(one.optimizer, lr=1e-3))
    ended = end(tmp_path, start(tmp_path, [one, other], devices=1))
    assert [each.code for each in ended] == [2, 2]
    assert "--lr: is 0.001 in process 1, and 0.003 in process 0" in ended[0].said
    assert not (tmp_path / "run").exists()

    (tmp_path / "other.txt").write_text("a text of its own. " * 400)
    data = dataclasses.replace(one.data, paths=(str(tmp_path / "other.txt"),))
    ended = end(tmp_path, start(tmp_path, [one, dataclasses.replace(one, data=data)], devices=1))
    assert [each.code for each in ended] == [2, 2]
    has = r"process {} has [0-9a-f]{{12}} \([\d,]+ training tokens in \S+, from \S*{}\)"
    words = rf"data: differs: {has.format(1, 'other.txt')}, and {has.format(0, 'animals.txt')}\n"
    assert re.search(words, ended[0].said), ended[0].said

    data = dataclasses.replace(one.data, paths=(str(tmp_path / "latin.txt"),))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 999)
    ended = end(tmp_path, start(tmp_path, [one, dataclasses.replace(one, data=data)], devices=1))
    assert [each.code for each in ended] == [2, 2]
    assert "process 1 of 2: " in ended[0].said and "latin.txt" in ended[0].said
    assert "Traceback" not in ended[0].said + ended[1].said


def test_a_process_that_cannot_write_its_part_stops_all_with_its_words(make_run, tmp_path):
    config = make_run(tmp_path / "run", mesh="fsdp=2", train={"steps": STEPS, "eval_every": 0})
    limited = [sys.executable, "-c", LIMITED]
    began = time.monotonic()
    ended = end(tmp_path, start(tmp_path, [config] * 2, devices=1, before={1: limited}))
    assert [each.code for each in ended] == [1, 1], [each.said for each in ended]
    assert "4.partial: could not be written: process 1 of 2: File too large" in ended[0].said, ended[0].said
    assert "Traceback" not in ended[0].said + ended[1].said
    assert time.monotonic() - began < 60
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_folders_that_are_not_shared_are_refused(make_run, tmp_path):
    one = make_run(Path("run"))
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    ended = end(tmp_path, start(tmp_path, [one, one], devices=1, cwd=[tmp_path / "a", tmp_path / "b"]))
    assert [each.code for each in ended] == [2, 2]
    assert "process 1 of 2: --out run: this process does not see what process 0 writes there" in ended[0].said
    assert not (tmp_path / "a" / "run").exists()
