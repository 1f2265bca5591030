"""metrics.jsonl is whole after any kill, holds each step once, and TensorBoard and W&B see the same numbers."""

import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from podling.config import Config, RunConfig, TrainConfig
from podling.errors import InputError, RunError
from podling.run.folder import RunFolder
from podling.run.metrics import MetricsLog, read_records, recent_loss


def config(**run):
    return dataclasses.replace(Config(), run=dataclasses.replace(RunConfig(tensorboard=False), **run))


@pytest.fixture
def run(tmp_path):
    with RunFolder.open(tmp_path / "run", config(), {}) as opened:
        yield opened


def open_log(run, restored_step=0, say=pytest.fail, **more):
    return MetricsLog(run.paths, config(**more), restored_step=restored_step, say=say)


def write_steps(run, steps, **more):
    log = open_log(run, **more)
    for step in steps:
        log.write({"step": step, "loss": 4.0 / step})
    log.close()


def test_each_record_is_one_line_on_disk_at_once(run):
    log = open_log(run)
    for step in (1, 2):
        log.write({"step": step, "loss": 1.5, "mfu": None, "note": "日本"})
        lines = run.paths.metrics.read_text().splitlines()
        assert len(lines) == step and json.loads(lines[-1]) == {"step": step, "loss": 1.5, "mfu": None, "note": "日本"}
    log.write({"step": np.int64(3), "loss": float("nan"), "grad_norm": np.float32("inf")})
    assert json.loads(run.paths.metrics.read_text().splitlines()[-1]) == {"step": 3, "loss": None, "grad_norm": None}
    log.close()


def test_records_are_synced_once_a_second_and_when_asked(run, monkeypatch):
    log, synced, now = open_log(run, tensorboard=True), [], [100.0]
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(read_records(run.paths.metrics)[0][-1]["step"]))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step, now[0] in ((1, 100.0), (2, 100.5), (3, 100.9), (4, 101.0), (5, 101.1)):
        log.write({"step": step, "loss": 2.0})
    assert set(synced) == {1, 4}
    log.sync()
    assert synced[-1] == 5
    assert read_events(run.paths.tensorboard)[-1].step == 5
    monkeypatch.undo()
    log.close()


def test_resuming_drops_the_records_that_will_be_computed_again(run):
    write_steps(run, range(1, 8))
    before = read_records(run.paths.metrics)[0]
    said = []
    write_steps(run, range(5, 8), restored_step=4, say=said.append)
    assert read_records(run.paths.metrics)[0] == before
    assert said == [f"{run.paths.metrics}: 3 records after step 4 will be computed again"]


def test_what_is_repeated_at_the_restored_step_is_recorded_once(run):
    """A run killed between its last checkpoint and its summary evaluates again when it is started again."""
    evaluation = {"step": 2, "val_loss": 3.0, "val_perplexity": 20.0}
    write_steps(run, [1, 2])
    for new in ({"step": 2, "other": 1.0}, {"step": 3, "loss": 1.0}):
        log = open_log(run, restored_step=2)
        log.write(evaluation)
        log.write(new)
        log.close()
    records = read_records(run.paths.metrics)[0]
    assert records[2:] == [evaluation, {"step": 2, "other": 1.0}, {"step": 3, "loss": 1.0}]


def test_a_torn_last_line_is_repaired_and_said(run):
    write_steps(run, [1, 2])
    with open(run.paths.metrics, "ab") as file:
        file.write(b'{"step": 3, "lo')
    said = []
    write_steps(run, [3], restored_step=2, say=said.append)
    assert [record["step"] for record in read_records(run.paths.metrics)[0]] == [1, 2, 3]
    assert said == [f"{run.paths.metrics}:3: torn last line; removed"]


def test_a_last_line_without_its_newline_is_torn_even_if_it_parses(run):
    """`{"step": 1}` may be the beginning of nothing, but `"step": 12` cut after the 1 parses too."""
    run.paths.metrics.write_bytes(b'{"step": 1}\n{"step": 2}')
    records, broken = read_records(run.paths.metrics)
    assert records == [{"step": 1}] and len(broken) == 1


def test_a_line_that_is_no_record_is_said_and_removed(run):
    run.paths.metrics.write_bytes(b'{"step": 1, "loss": 3}\n\x00\xff\n[3]\n{"step": 2, "loss": 3}\n')
    said = []
    open_log(run, restored_step=2, say=said.append).close()
    assert [line.removeprefix(f"{run.paths.metrics}:") for line in said] == [
        "2: is not a JSON object; removed",
        "3: is not a JSON object; removed",
    ]
    assert run.paths.metrics.read_bytes() == b'{"step": 1, "loss": 3}\n{"step": 2, "loss": 3}\n'


def test_an_untouched_file_is_not_rewritten(run):
    write_steps(run, [1, 2])
    inode = run.paths.metrics.stat().st_ino
    write_steps(run, [3], restored_step=2)
    assert run.paths.metrics.stat().st_ino == inode


def read_events(folder):
    """A second reader of the format: length, its checksum, an Event message, its checksum."""
    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            body = data[12 : 12 + size]
            assert int.from_bytes(data[12 + size : 16 + size], "little") == masked_crc32c(body)
            events.append(Event.FromString(body))
            data = data[16 + size :]
    return events


def test_tensorboard_gets_the_same_numbers_and_forgets_dropped_steps(run):
    write_steps(run, [1, 2, 3], tensorboard=True)
    log = open_log(run, restored_step=2, say=lambda line: None, tensorboard=True)
    log.write({"step": 3, "loss": 0.5, "mfu": None})
    log.write({"step": 3, "val_loss": 0.75})
    log.close()
    events = read_events(run.paths.tensorboard)
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert (1, "train/loss", 4.0) in scalars and (2, "train/loss", 2.0) in scalars
    assert (3, "train/loss", 0.5) in scalars and (3, "heldout/val_loss", 0.75) in scalars
    assert not any("mfu" in tag or "step" in tag for _, tag, _ in scalars)
    assert [e.step for e in events if e.session_log.status == SessionLog.START] == [3]


def test_the_recent_loss_is_the_mean_of_the_last_steps(run):
    assert recent_loss(run.paths) is None
    log = open_log(run)
    for step in range(1, 101):
        log.write({"step": step, "loss": float(step)})
        log.write({"step": step, "val_loss": 0.0})
    log.close()
    assert recent_loss(run.paths) == sum(range(51, 101)) / 50


def test_no_tensorboard_folder_unless_asked(run):
    write_steps(run, [1])
    assert not run.paths.tensorboard.exists()


def test_missing_wandb_is_answered_with_its_install_command(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'podling\[wandb\]'"):
        open_log(run, wandb="pods")


def test_wandb_gets_the_records_under_one_id_over_sessions(run, monkeypatch):
    started, logged, finished = [], [], []

    class Session:
        def log(self, record, step):
            logged.append((step, record))

        def finish(self):
            finished.append(True)

    def init(**arguments):
        started.append(arguments)
        return Session()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    write_steps(run, [1, 2], wandb="pods")
    write_steps(run, [3], restored_step=2, wandb="pods")
    assert logged == [(1, {"train/loss": 4.0}), (2, {"train/loss": 2.0}), (3, {"train/loss": 4.0 / 3})]
    assert len(finished) == 2
    assert started[0]["id"] == started[1]["id"] and started[0]["resume"] == "allow"
    assert started[0]["project"] == "pods" and started[0]["config"]["train"]["steps"] == TrainConfig().steps


def test_a_full_disk_ends_the_run_even_if_the_events_meet_it_first(run):
    """The thread that wrote events died of it, and after a thousand more of them the run hung."""
    program = """
import pathlib, resource, sys, dataclasses
from podling.config import Config
from podling.errors import RunError
from podling.run.metrics import MetricsLog
from podling.run.folder import RunPaths
run = RunPaths(pathlib.Path(sys.argv[1]))
log = MetricsLog(run, Config(), restored_step=0, say=print)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    for step in range(1, 5000):
        log.write({"step": step, **{f"figure_{n}": 0.5 for n in range(9)}})
except RunError as error:
    log.close()
    sys.exit(f"{error}")
"""
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, timeout=60)
    assert str(run.path) in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == 1


def test_a_full_disk_is_a_run_error_naming_the_file(run):
    program = """
import pathlib, resource, sys, dataclasses
from podling.config import Config, RunConfig, TrainConfig
from podling.errors import RunError
from podling.run.metrics import MetricsLog
from podling.run.folder import RunPaths
config = dataclasses.replace(Config(), run=RunConfig(tensorboard=False))
log = MetricsLog(RunPaths(pathlib.Path(sys.argv[1])), config, restored_step=0, say=print)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
for step in range(1, 9):
    try:
        log.write({"step": step})
    except RunError as error:
        sys.exit(f"{step} {error}")
"""
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, timeout=30)
    step = int(done.stderr.split()[0])
    assert str(run.paths.metrics) in done.stderr and "Traceback" not in done.stderr
    assert [record["step"] for record in read_records(run.paths.metrics)[0]] == list(range(1, step))
    assert RunError.exit_code == 1


class FullDisk(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


def fill_disk(log):
    log._file.close()
    log._file = io.BufferedWriter(FullDisk())


def test_closing_a_full_disk_does_not_hide_what_ended_the_run(run):
    """What the failed write left in the buffer fails once more when the file is closed."""
    with pytest.raises(RunError, match="no space left to write it") as caught, open_log(run) as log:
        fill_disk(log)
        log.write({"step": 1})
    assert caught.value.problems[0].fix == "free some space, then repeat"
    with pytest.raises(KeyboardInterrupt), open_log(run) as log:
        fill_disk(log)
        log._file.write(b"left behind")
        raise KeyboardInterrupt


def test_a_full_disk_met_first_by_closing_is_the_same_run_error(run):
    with pytest.raises(RunError, match="metrics.jsonl: no space left to write it"), open_log(run) as log:
        fill_disk(log)
        log._file.write(b"left behind")


def test_a_record_that_was_deleted_by_hand_is_missed(run):
    write_steps(run, range(1, 8))
    lines = run.paths.metrics.read_bytes().splitlines(keepends=True)
    run.paths.metrics.write_bytes(b"".join(lines[3:]))
    said = []
    open_log(run, restored_step=7, say=said.append).close()
    assert said == [
        f"{run.paths.metrics}: 3 of the 7 steps before are not recorded; train_loss will be of those that are"
    ]
