"""A run folder: one writer, one configuration, one data set; every refusal says what to do."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from podling.config import Config, flags
from podling.errors import InputError
from podling.run.folder import RunFolder, load_run
from podling.run.match import FREE, SAID

PRINTS = {"data": "a" * 64, "tokenizer": "b" * 64}


def changed(config=None, **fields):
    """`changed(train_steps=5)` is the default configuration with `train.steps` 5."""
    config = config or Config()
    for name, value in fields.items():
        section, field = name.split("_", 1)
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "runs" / "one"
    RunFolder.open(path, Config(), PRINTS).close()
    return path


def test_a_new_run_is_created_and_the_same_command_continues_it(tmp_path):
    out = tmp_path / "deep" / "run"
    config = changed(data_paths=("a.txt", "b.txt"), train_steps=7)
    with RunFolder.open(out, config, PRINTS) as run:
        assert run.is_new and not run.finished and run.summary is None and run.notes == []
        assert run.path == out
    before = (out / "config.json").stat()
    with RunFolder.open(out, config, PRINTS) as run:
        assert not run.is_new and run.notes == []
    assert (out / "config.json").stat().st_mtime_ns == before.st_mtime_ns
    loaded, paths = load_run(out)
    assert loaded == config
    assert paths.checkpoints == out / "checkpoints"


SUMMARY = {"val_loss": 1.5, "steps": 3, "tokens": 12, "params": 7, "wall_s": 0.5}


@pytest.mark.parametrize("damage", ["{}", "[]", "", '{"val_loss": 1'])
def test_a_summary_that_is_none_is_made_again(out, damage):
    with RunFolder.open(out, Config(), PRINTS) as run:
        run.mark_finished(SUMMARY | {"run": "x"})
    (out / "summary.json").write_text(damage)
    with RunFolder.open(out, Config(), PRINTS) as run:
        assert not run.finished and run.summary is None
        assert run.notes == [f"{out / 'summary.json'} is not a summary; the run's end is done again"]


def test_a_finished_run_gives_its_summary(out):
    with RunFolder.open(out, Config(), PRINTS) as run:
        run.mark_finished(SUMMARY | {"run": "日本"})
        assert run.finished
    with RunFolder.open(out, Config(), PRINTS) as run:
        assert run.finished and run.summary == SUMMARY | {"run": str(out), "export": None}
    (out / "export").mkdir()
    moved = out.rename(out.with_name("moved"))
    with RunFolder.open(moved, Config(), PRINTS) as run:  # the summary speaks of where things are now
        assert run.summary == SUMMARY | {"run": str(moved), "export": str(moved / "export")}


def test_another_configuration_is_refused_naming_every_field(out):
    other = changed(train_steps=5, optimizer_lr=0.5, model_layers=9, data_paths=("x.txt",))
    with pytest.raises(InputError) as caught:
        RunFolder.open(out, other, PRINTS)
    lines = {problem.where: problem.what for problem in caught.value.problems}
    assert lines["--steps"] == f"{Config().train.steps} → 5"
    assert lines["--lr"] == f"{Config().optimizer.lr} → 0.5"
    assert lines["--model.layers"] == "4 → 9"
    assert "--data" not in lines, "the same text at another place is no other configuration"
    assert len(lines) == 4 and "another configuration" in str(caught.value) and "--resume" in str(caught.value)
    assert load_run(out)[0] == Config(), "a refused command changes nothing"


def test_every_field_is_either_refused_said_or_free(out):
    """Also finds a field that was renamed or added without a decision about it."""
    known = {(flag.section, flag.field) for flag in flags()}
    assert known >= FREE | SAID and not FREE & SAID
    for flag in flags():
        value = getattr(getattr(Config(), flag.section), flag.field)
        other = (
            (not value)
            if isinstance(value, bool)
            else (value + 1)
            if isinstance(value, int | float)
            else ("z",)
            if isinstance(value, tuple)
            else "other"
        )
        config = changed(**{f"{flag.section}_{flag.field}": other})
        key = (flag.section, flag.field)
        if key in FREE | SAID:
            with RunFolder.open(out, config, PRINTS) as run:
                assert bool(run.notes) == (key in SAID), flag
                assert load_run(out)[0] == Config(), "nothing is saved before it is accepted"
                run.keep(config)
                assert load_run(out)[0] == config
                run.keep(Config())
        else:
            with pytest.raises(InputError, match=re.escape(f"{flag.name}: ")):
                RunFolder.open(out, config, PRINTS)


def test_changed_data_is_refused(out):
    with pytest.raises(InputError, match="data: changed since the run began: aaaaaaaaaaaa → cccccccccccc"):
        RunFolder.open(out, Config(), PRINTS | {"data": "c" * 64})
    with pytest.raises(InputError) as caught:
        RunFolder.open(out, changed(data_paths=("x.txt",)), PRINTS | {"data": "c" * 64})
    assert [problem.where for problem in caught.value.problems][:2] == ["--data", "data"]


def test_a_path_below_a_file_a_file_and_a_foreign_folder_are_refused_untouched(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for bad in (file, file / "run", file / "deep" / "run"):
        with pytest.raises(InputError, match="is a file, or lies below one"):
            RunFolder.open(bad, Config(), PRINTS)
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not a run and not empty \(chapter\.txt\)"):
        RunFolder.open(foreign, Config(), PRINTS)
    assert [path.name for path in foreign.iterdir()] == ["chapter.txt"]


def test_a_session_killed_while_creating_the_run_leaves_a_folder_that_can_be_used(out):
    (out / "config.json").unlink()
    (out / ".config.json.123.tmp").write_text("half")
    with RunFolder.open(out, Config(), PRINTS) as run:
        assert run.is_new


def test_broken_config_is_an_input_error_naming_the_file(out):
    for text in ("{", json.dumps({"version": 1, "train": {"stepz": 3}})):
        (out / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config\.json"):
            RunFolder.open(out, Config(), PRINTS)


def test_loading_what_is_no_run_names_the_runs_nearby(out):
    with pytest.raises(InputError, match=f"there is no such run\n.*{re.escape(str(out))}"):
        load_run(out.parent / "two")
    with pytest.raises(InputError, match="is not a run folder"):
        load_run(out.parent)


HOLD = """
import sys, time, pathlib
from podling.config import Config
from podling.run.folder import RunFolder
run = RunFolder.open(pathlib.Path(sys.argv[1]), Config(), {})
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_until_the_first_is_gone_even_by_kill(tmp_path):
    out = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(
            InputError, match=rf"being written by process {holder.pid} on .* since \d{{4}}-\d\d-\d\d \d\d:"
        ):
            RunFolder.open(out, Config(), PRINTS)
        load_run(out)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    deadline = time.monotonic() + 5
    while True:
        try:
            RunFolder.open(out, Config(), {}).close()
            break
        except InputError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_opening_a_run_needs_no_jax():
    program = "import sys, podling.run.folder; sys.exit(any(m in sys.modules for m in ('jax', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
