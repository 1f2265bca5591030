"""A layout compiled for a target by the target's own compiler, in a process of its own, and read."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from podling.config import Config, to_dict
from podling.cost.cpu import cpu_step_time
from podling.cost.cpu_peaks import measure_cpu
from podling.cost.hbm import MemoryStats, hbm_of
from podling.cost.records import Hbm, Layout, StepTime
from podling.cost.refusal import read_refusal
from podling.cost.step_time import step_time
from podling.errors import InputError, Problem, RunError
from podling.files import show_binary, writing
from podling.hlo.program import read_program
from podling.parallel.axes import read_mesh
from podling.plan.cache import NO_SPACE, READING_SOURCE, Programs, program_key, source_hash
from podling.plan.decode import decode
from podling.plan.records import Option
from podling.plan.target import Target
from podling.topology import compiler_environment

LEAST_FREE = 1 << 16
"""Bytes free on a disk that counts as full."""
SHOWN_OPS = 60
"""Instructions kept of a reading: those that take most time."""
SHOWN_WORDS = 300
"""Characters shown of what a compiler said when it died; all of it is in a file."""


@dataclass(frozen=True)
class _Reading:
    """What is read from a program."""

    hbm: Hbm
    time: StepTime


def with_layout(config: Config, layout: Layout) -> Config:
    """The configuration that trains in this layout."""
    train = replace(config.train, micro_batch=layout.micro_batch, remat=layout.remat, loss_chunk=layout.loss_chunk)
    return replace(config, train=train, run=replace(config.run, mesh=layout.mesh))


class Compiler:
    """Answers what a layout takes on a target, from the cache where it was asked before.

    Args:
        config: resolved (`vocab_size`, `steps` known); its layout is overridden by each that is asked.
        target: TPUs, or the CPU of this machine.
        programs: the cache.
        say: told what is being compiled.
    """

    def __init__(self, config: Config, target: Target, programs: Programs, say: Callable[[str], None]):
        self.config, self.target, self.programs, self.say = config, target, programs, say
        self.compiled = 0

    def option(self, layout: Layout) -> Option:
        """Compile the layout, or find it compiled.

        Raises:
            RunError: the compiler died.
            InputError: the target is not one of its own.
        """
        config = with_layout(self.config, layout)
        job = self._job(layout)
        key = program_key(config, job)
        answer = self._known(key) or self._compile(config, job, key, layout)
        where = str(self.programs.compiler_text(key))
        if "refused" in answer:
            refusal = read_refusal(answer["refused"], self.target.device_bytes)
            return Option(layout, refusal.hbm, None, answer["compile_s"], refusal.words, where)
        hbm, time_ = self._read(key, layout, answer)
        over = "" if hbm.fits else _too_much(hbm)
        return Option(layout, hbm, time_, answer["compile_s"], over, where)

    def _known(self, key: str) -> dict[str, Any] | None:
        """The answer that the cache has; None where it has none, or what it has is damaged."""
        answer = self.programs.answer(key) or {}
        try:
            decode(float, answer.get("compile_s"))
            if "refused" in answer:
                decode(str, answer["refused"])
                return answer
            decode(MemoryStats, answer.get("memory"))
        except ValueError:
            return None
        return answer if self.programs.text(key) is not None else None

    def _job(self, layout: Layout) -> dict[str, Any]:
        topology = self.target.topology
        return {
            "topology": topology.name if topology else "",
            "slices": self.target.slices,
            "devices": self.target.devices,
            "platform": self.target.platform,
            "mesh": layout.mesh,
            "micro_batch": layout.micro_batch,
            "accumulation": layout.accumulation,
        }

    def _compile(self, config: Config, job: dict[str, Any], key: str, layout: Layout) -> dict[str, Any]:
        self.say(f"compiling for {self.target.name}: {layout}")
        with self.programs.filling(key) as folder:
            answer = run_child(folder, {**job, "config": to_dict(config)})
        self.compiled += 1
        return answer

    def _read(self, key: str, layout: Layout, answer: dict[str, Any]) -> tuple[Hbm, StepTime]:
        stats, sizes = MemoryStats(**answer["memory"]), read_mesh(layout.mesh)[0]
        if self.target.platform == "cpu":  # its speed is measured, each time
            self.say(f"measuring this machine: matrix products and memory, for {layout}")
            program = read_program(self.programs.text(key) or "")
            peaks = measure_cpu(program)
            return hbm_of(program, stats, self.target.device_bytes), cpu_step_time(
                program, peaks, sizes, stats.temp_bytes
            )
        how = source_hash(READING_SOURCE)
        try:
            found = decode(_Reading, self.programs.reading(key, how))
        except ValueError:  # not read yet, or damaged
            program = read_program(self.programs.text(key) or "")
            hbm = hbm_of(program, stats, self.target.device_bytes)
            read = step_time(program, self.target.chip, sizes, self.target.topology, self.target.slices)
            found = _Reading(hbm, replace(read, ops=read.ops[:SHOWN_OPS]))
            self.programs.keep_reading(key, how, asdict(found))
        return found.hbm, found.time


def _too_much(hbm: Hbm) -> str:
    """The compiler's limit is for its temporaries; what is passed in, and gaps, must have room too."""
    held, limit = show_binary(hbm.total_bytes), show_binary(hbm.limit_bytes)
    return f"the compiler takes it, but all together it holds {held}, and a device has {limit}"


def run_child(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run the compiler on a job, its output in `folder/compiler.txt`; what it answered.

    Raises:
        InputError: what the compiler does not take.
        RunError: no space for what it writes, or it died; the file with its words is named.
    """
    environment = {**os.environ, **(compiler_environment() if job["topology"] else {"JAX_PLATFORMS": "cpu"})}
    if not job["topology"]:
        environment["JAX_NUM_CPU_DEVICES"] = str(job["devices"])
    with writing(folder), (folder / "compiler.txt").open("wb") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "podling.plan.child", str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env=environment,
        )
        try:
            child.communicate(json.dumps(job).encode())
        finally:
            child.kill()
            child.wait()
    answer_file = folder / "answer.json"
    if child.returncode > 0:
        _no_space(folder, child.returncode)
    if child.returncode or not answer_file.exists():
        raise RunError(_died(folder, child.returncode))
    answer = json.loads(answer_file.read_text())
    if "problems" in answer:
        raise InputError([Problem(**problem) for problem in answer["problems"]])
    if "refused" in answer:
        with writing(folder), (folder / "compiler.txt").open("a") as said:
            said.write("\n" + answer["refused"] + "\n")
    return answer


def _no_space(folder: Path, code: int) -> None:
    """Raise what `writing` does if this is why the child failed: it ends with the number of the error."""
    full = shutil.disk_usage(folder).free < LEAST_FREE
    if code in NO_SPACE or full:
        with writing(folder.parent):
            number = code if code in NO_SPACE else errno.ENOSPC
            raise OSError(number, os.strerror(number))


def _died(folder: Path, code: int) -> Problem:
    """What to say of a compiler that left no answer; its words are kept where the folder will not be removed."""
    text = (folder / "compiler.txt").read_text(errors="replace")
    kept = folder.parent / "last-failure.txt"
    with writing(kept):
        kept.write_text(text)
    if code == -9:
        what = "was killed: this machine has too little memory for it, or someone stopped it"
        return Problem("the compiler", what, f"close other programs, then repeat; its output: {kept}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    last = last if len(last) <= SHOWN_WORDS else last[:SHOWN_WORDS] + " ..."
    return Problem("the compiler", f"failed: {last}", f"its whole output: {kept}")
