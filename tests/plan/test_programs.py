"""Compiled programs by content: found again, made again when damaged, and never half there."""

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podling.config import Config, to_dict
from podling.cost.records import Layout
from podling.errors import InputError, RunError
from podling.plan import cache, compile
from podling.plan.cache import Programs, program_key
from podling.plan.compile import Compiler, run_child
from podling.plan.target import parse_target
from podling.presets import PRESETS

NANO = PRESETS["gpt2-nano"].config
TINY = replace(
    NANO,
    model=replace(NANO.model, layers=1, heads=2, embed=32, mlp=64, context=16, vocab_size=64),
    train=replace(NANO.train, batch_tokens=64),
)
LAYOUT = Layout("data=1", 4, 1, "none", 0)
CPU = parse_target("cpu")
PROGRAM = """HloModule jit_train_step, is_scheduled=true, num_partitions=1

ENTRY %main (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0:T(8,128)} parameter(0), metadata={op_name="state.params.token"}
  ROOT %b = f32[4,4]{1,0:T(8,128)} add(%a, %a), backend_config={"window_config":{"estimated_cycles":"3000"}}
}
"""
MEMORY = {"argument_bytes": 64, "output_bytes": 64, "alias_bytes": 0, "temp_bytes": 100, "code_bytes": 10}


class Child:
    """Stands in for the process: writes what it would."""

    def __init__(self, **answer: Any):
        self.answer = {"memory": MEMORY, "lower_s": 0.1, "compile_s": 2.0, **answer}
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
        self.jobs.append(job)
        (folder / "compiler.txt").write_text("words")
        (folder / "program.hlo.gz").write_bytes(gzip.compress(PROGRAM.encode()))
        (folder / "answer.json").write_text(json.dumps(self.answer))
        return self.answer


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    made = Child()
    monkeypatch.setattr(compile, "run_child", made)
    return made


def compiler(folder: Path, config: Config = TINY, chip: str = "v5e-1") -> Compiler:
    return Compiler(config, parse_target(chip), Programs(folder), lambda text: None)


def test_a_second_question_is_not_compiled(tmp_path: Path, child: Child) -> None:
    first = compiler(tmp_path).option(LAYOUT)
    again = compiler(tmp_path)
    assert again.option(LAYOUT) == first
    assert len(child.jobs) == 1 and again.compiled == 0
    assert first.hbm.total_bytes == 64 + 64 + 100 + 10
    assert first.time is not None and first.time.step_s > 0
    again.option(replace(LAYOUT, remat="full"))
    assert len(child.jobs) == 2


@pytest.mark.parametrize("name", ["answer.json", "program.hlo.gz"])
@pytest.mark.parametrize("damage", [b"", b"{", b'{"a": 1}', b"\x1f\x8b\x08\x00 not gzip"])
def test_what_is_damaged_is_compiled_again(tmp_path: Path, child: Child, name: str, damage: bytes) -> None:
    first = compiler(tmp_path).option(LAYOUT)
    (file,) = tmp_path.glob(f"*/{name}")
    file.write_bytes(damage)
    assert compiler(tmp_path).option(LAYOUT) == first
    assert len(child.jobs) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "{",
        lambda text: '{"a": 1}',
        lambda text: '{"hbm": 1, "time": []}',
        lambda text: re.sub(r'("total_bytes": )(\d+)', r'\1"\2"', text),
        lambda text: re.sub(r'("step_s": )([^,]+)', r"\1NaN", text),
    ],
)
def test_a_damaged_reading_is_read_again(tmp_path: Path, child: Child, damage: Callable[[str], str]) -> None:
    first = compiler(tmp_path).option(LAYOUT)
    (file,) = tmp_path.glob("*/reading-*.json")
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged)
    assert compiler(tmp_path).option(LAYOUT) == first
    assert len(child.jobs) == 1


def test_the_key_is_of_what_decides_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    key = program_key(TINY, {"mesh": "data=1"})
    for same in (
        replace(TINY, optimizer=replace(TINY.optimizer, lr=1e-5, warmup_steps=3)),
        replace(TINY, train=replace(TINY.train, steps=7, seed=3)),
        replace(TINY, run=replace(TINY.run, out="elsewhere")),
        replace(TINY, model=replace(TINY.model, preset="gpt2")),
    ):
        assert program_key(same, {"mesh": "data=1"}) == key
    for other in (
        replace(TINY, optimizer=replace(TINY.optimizer, clip_norm=0.0)),
        replace(TINY, optimizer=replace(TINY.optimizer, schedule="wsd")),
        replace(TINY, train=replace(TINY.train, remat="dots")),
        replace(TINY, model=replace(TINY.model, dropout=0.1)),
    ):
        assert program_key(other, {"mesh": "data=1"}) != key
    assert program_key(TINY, {"mesh": "fsdp=1"}) != key
    monkeypatch.setattr(cache, "_versions", lambda: ["jax 99"])
    assert program_key(TINY, {"mesh": "data=1"}) != key


def test_a_refusal_is_an_answer_and_is_kept(tmp_path: Path, child: Child) -> None:
    child.answer["refused"] = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (28.07G) exceeds "
        "available HBM (15.75G)."
    )
    for _ in range(2):
        option = compiler(tmp_path).option(LAYOUT)
        assert not option.fits and option.time is None
        assert "28.07 GiB" in option.refusal and option.hbm.limit_bytes == int(15.75 * 2**30)
        assert Path(option.compiler_text).read_text() == "words"
    assert len(child.jobs) == 1


def test_a_child_that_dies_leaves_nothing_but_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="the compiler: failed"):
        compiler(tmp_path).option(LAYOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["last-failure.txt"]


def test_a_killed_child_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(compile.sys, "executable", str(script))
    folder = tmp_path / "cache" / "job"
    folder.mkdir(parents=True)
    with pytest.raises(RunError, match="was killed"):
        run_child(folder, {"topology": "", "devices": 1})


def test_a_child_that_dies_with_a_long_message_is_quoted_in_short(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "python"
    words = "AssertionError: jax_devices=[" + "device, " * 2000
    script.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(compile.sys, "executable", str(script))
    folder = tmp_path / "cache" / "job"
    folder.mkdir(parents=True)
    with pytest.raises(RunError, match="failed: AssertionError: jax_devices") as error:
        run_child(folder, {"topology": "", "devices": 1})
    assert len(error.value.problems[0].what) < 330
    kept = folder.parent / "last-failure.txt"
    assert str(kept) in str(error.value) and kept.read_text().strip() == words.strip()


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, child: Child) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        compiler(tmp_path / "file" / "cache").option(LAYOUT)


def test_a_toy_is_really_compiled_and_read(tmp_path: Path) -> None:
    """On this CPU, in a process of its own, as it would be for a TPU."""
    option = compiler(tmp_path, chip="cpu").option(LAYOUT)
    assert option.fits and option.compile_s is not None and option.compile_s > 0
    # Parameters and two moments in float32, exactly: 1 block of 32, 64 tokens padded to 128, 16 positions.
    params = 128 * 32 + 16 * 32 + 2 * 32 + (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32)
    assert option.hbm.by_category["parameters"] == 4 * params
    assert option.hbm.by_category["moments"] // (4 * params) == 2
    assert not list(tmp_path.glob(".*")), "nothing half-made is left"
    assert os.listdir(tmp_path / os.listdir(tmp_path)[0])


def test_a_program_that_is_taken_but_too_large_does_not_fit(tmp_path: Path, child: Child) -> None:
    child.answer["memory"] = {**MEMORY, "temp_bytes": 16 * 2**30}
    option = compiler(tmp_path).option(LAYOUT)
    assert not option.fits
    assert option.refusal == "the compiler takes it, but all together it holds 16.00 GiB, and a device has 15.75 GiB"


@pytest.mark.parametrize(
    "answer",
    [{"memory": {"a": 1}, "compile_s": 1.0}, {"memory": {**MEMORY, "temp_bytes": "100"}, "compile_s": 1.0},
     {"memory": MEMORY}, {"refused": 3, "compile_s": 1.0}],
)  # fmt: skip
def test_an_answer_of_another_shape_is_asked_again(tmp_path: Path, child: Child, answer: dict[str, Any]) -> None:
    first = compiler(tmp_path).option(LAYOUT)
    (file,) = tmp_path.glob("*/answer.json")
    file.write_text(json.dumps(answer))
    assert compiler(tmp_path).option(LAYOUT) == first
    assert len(child.jobs) == 2


def test_a_reading_that_cannot_be_kept_is_an_answer_all_the_same(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler(tmp_path).option(LAYOUT)
    (file,) = tmp_path.glob("*/reading-*.json")
    file.unlink()

    def refuse(*args: Any, **how: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("podling.files.tempfile.mkstemp", refuse)  # as root one may write anywhere
    assert compiler(tmp_path).option(LAYOUT) == first and not file.exists()


@pytest.mark.parametrize("full", [True, False])
def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexit {1 if full else errno.ENOSPC}\n")  # it could, or could not, say why
    script.chmod(0o755)
    monkeypatch.setattr(compile.sys, "executable", str(script))
    if full:
        usage = shutil.disk_usage(tmp_path)._replace(free=0)
        monkeypatch.setattr(compile.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RunError, match="no space left"):
        compiler(tmp_path / "cache").option(LAYOUT)
    assert os.listdir(tmp_path / "cache") == []


def test_the_process_that_compiles_tells_of_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "program.hlo.gz").symlink_to("/dev/full")
    config = replace(TINY, run=replace(TINY.run, mesh="data=1"))
    job = {"topology": "", "slices": 1, "devices": 1, "platform": "cpu", "mesh": "data=1", "micro_batch": 4}
    job = {**job, "accumulation": 1, "config": to_dict(config)}
    with pytest.raises(RunError, match="no space left"):
        run_child(tmp_path, job)


def test_what_a_killed_plan_left_is_removed_later(tmp_path: Path) -> None:
    old, young = tmp_path / ".a.partial", tmp_path / ".b.partial"
    for folder in (old, young):
        folder.mkdir()
        (folder / "compiler.txt").write_text("words")
    os.utime(old, (time.time() - 3700,) * 2)
    Programs(tmp_path).tidy()
    assert not old.exists() and young.exists()
    Programs(tmp_path / "none").tidy()


def test_a_success_takes_the_last_failure_away(tmp_path: Path, child: Child) -> None:
    (tmp_path / "last-failure.txt").write_text("words")
    compiler(tmp_path).option(LAYOUT)
    assert not (tmp_path / "last-failure.txt").exists()


def test_the_process_that_compiles_ends_with_the_plan(tmp_path: Path) -> None:
    child = (
        "import os, sys, time; from podling.plan.child import end_with; end_with(int(sys.argv[1]), 0.1);"
        "print('on', flush=True); time.sleep(60)"
    )
    plan = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    with subprocess.Popen([sys.executable, "-c", plan], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"on\n"
        began_s = time.monotonic()
        process.kill()
        assert process.stdout.read() == b""  # it ends when the child, too, has closed it
    assert time.monotonic() - began_s < 30
