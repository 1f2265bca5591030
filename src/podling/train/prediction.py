"""A run's step compiled, what it should take foretold from the program, and held against what it took.

The prediction is written to the run folder before the first step, so that nothing measured can have gone into it. It
costs a run nothing but seconds: what goes wrong here is said, and the run goes on without it.
"""

import contextlib
import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from podling.cost.hbm import memory_stats
from podling.cost.records import KINDS, Layout, StepTime
from podling.cost.refusal import read_refusal
from podling.errors import PodlingError, Problem, RunError
from podling.files import atomic_write, read_json, show_binary
from podling.hlo.program import read_program
from podling.hosts.waits import COMPILE_S
from podling.parallel.axes import mesh_text
from podling.run.compile_cache import CompileCache
from podling.run.folder import RunFolder
from podling.train.auto_mesh import joined
from podling.train.batch_plan import machine_memory_bytes
from podling.train.earlier import basis, earlier
from podling.train.meter import Meter
from podling.train.progress import Reporter
from podling.train.progress.words import count, predicted
from podling.train.session import Session
from podling.train.setup import Setup
from podling.train.together import Together

LESS_MEMORY = "a smaller --train.micro-batch, --train.remat full or a --train.loss-chunk needs less"
"""What to do about a step that does not fit."""


class NoPrediction(Exception):
    """There is nothing to foretell a step's time with; the argument says why."""


@dataclass(frozen=True)
class Forecast:
    """What was said before the first step of this session: a prediction, or why there is none."""

    facts: dict[str, Any]  # as in prediction.json

    def beside(self, measured_step_s: float | None, *, part: bool = False) -> dict[str, Any]:
        """The record for the summary: the prediction and what the steps took.

        Args:
            measured_step_s: mean over the timed steps; None when there was none.
            part: these were the steps of this session, and the run had others before.
        """
        step_s = self.facts.get("step_s")
        known = step_s is not None and measured_step_s is not None
        ratio = measured_step_s / step_s if known else None  # type: ignore[operator]
        measured = {"measured_step_s": measured_step_s, "measured_over_predicted": ratio}
        return {**self.facts, **measured, "measured_in": "this session" if part else "the run"}

    @property
    def said(self) -> str:
        """One line of it."""
        if "missing" in self.facts:
            return f"no prediction of the step's time: {self.facts['missing']}"
        parts = sorted(((part_s, kind) for kind, part_s in self.facts["parts_s"].items() if part_s > 0), reverse=True)
        shares = ", ".join(f"{kind} {part_s / self.facts['step_s']:.0%}" for part_s, kind in parts)
        speed = f"{count(self.facts['tokens_per_s'])} tokens/s"
        since = (
            f", by the session of {measured}" if (measured := self.facts.get("measured")) != self.facts["made"] else ""
        )
        return f"predicted: {predicted(self.facts)}, {speed} ({shares}); {self.facts['calibration']}{since}"


def compile_and_foretell(
    session: Session, programs: CompileCache, folder: RunFolder, reporter: Reporter, together: Together
) -> Forecast | None:
    """Make the step's program, keep it with the run, and let the first process say how long a step should take.

    Args:
        session: whose step it is.
        programs: of the run.
        folder: the run folder, held by the first process.
        reporter: shows that it compiles, and is told the prediction.
        together: the processes, which all call this.

    Returns:
        None in all processes but the first.

    Raises:
        RunError: the devices have too little memory for the program.
    """
    about_s = 5 if session.mesh.devices.flat[0].platform == "cpu" else 40
    name, began_s = "compiling the training step", time.perf_counter()
    with reporter.status(name, about_s), together.gate(name, COMPILE_S):
        program = _compile(session)
        check_fits(session, program)
    compile_s = time.perf_counter() - began_s
    programs.seal()
    if not together.is_first:
        return None
    shown = contextlib.nullcontext() if _shared(session) else reporter.status("predicting the step's time", 3)
    with shown:
        forecast = foretell(session, program, together.hosts.count, compile_s, folder.paths.prediction)
    reporter.say(forecast.said)
    try:
        atomic_write(folder.paths.prediction, json.dumps(forecast.facts, indent=2, ensure_ascii=False) + "\n")
    except PodlingError as error:
        reporter.say(f"the prediction is not kept: {error}")
    return forecast


def _compile(session: Session) -> jax.stages.Compiled:
    try:
        return session.compile_step()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        words = read_refusal(str(error), 0).words
        raise RunError(Problem("compiling the training step", words, LESS_MEMORY)) from error


def check_fits(session: Session, program: jax.stages.Compiled) -> None:
    """Refuse a step that needs more than a CPU's machine has; what does not fit an accelerator is never compiled.

    Raises:
        RunError: it does, with both figures.
    """
    devices = session.mesh.devices.flat
    if devices[0].platform != "cpu" or not program.memory_analysis():
        return
    here = sum(device.process_index == jax.process_index() for device in devices) * session.processes_here
    need, has = memory_stats(program).total_bytes * here, machine_memory_bytes()
    if need > has:
        what = f"the step needs {show_binary(need)}, and this machine has {show_binary(has)} of memory"
        raise RunError(Problem("the training step", what, LESS_MEMORY))


def for_summary(forecast: Forecast | None, meter: Meter, folder: RunFolder) -> dict[str, Any] | None:
    """What was foretold beside what was measured.

    Args:
        forecast: of this session; None when no step was left for it: then what the session before has foretold stands
            beside the steps of the whole run.
        meter: has timed them.
        folder: the run folder.
    """
    if forecast is not None:
        return forecast.beside(meter.session_step_s, part=meter.is_resumed)
    try:
        return Forecast(read_json(folder.paths.prediction)).beside(meter.totals()["step_s"])
    except PodlingError:  # there is none, or it cannot be read
        return None


def _shared(session: Session | Setup) -> bool:
    """Whether several devices are one CPU, or the CPUs of several processes."""
    return session.mesh.devices.flat[0].platform == "cpu" and session.mesh.size > 1


def foretell(
    session: Session, program: jax.stages.Compiled, processes: int, compile_s: float, before: Path
) -> Forecast:
    """What `prediction.json` is to hold, of this session; why there is no prediction is part of it.

    Args:
        session: gives devices and batch.
        program: the compiled step.
        processes: of the run.
        compile_s: how long compiling took.
        before: the prediction of an earlier session, which may do for this one.
    """
    began_s = time.perf_counter()
    device = session.mesh.devices.flat[0]
    facts: dict[str, Any] = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device.device_kind,
        "devices": session.mesh.size,
        **session.layout,
        "compile_s": compile_s,
    }
    try:
        facts["basis"] = basis(device, program)
        facts["measured"] = facts["made"]
        facts |= earlier(before, facts["basis"]) or _record(
            predict_step(session, program, processes), session.plan.tokens
        )
    except NoPrediction as why:
        facts["missing"] = str(why)
    except Exception as error:  # the run is worth more than its prediction, whatever went wrong
        facts["missing"] = str(error) if isinstance(error, PodlingError) else f"{type(error).__name__}: {error}"
    facts["prediction_s"] = time.perf_counter() - began_s
    return Forecast(facts)


def predict_step(session: Session | Setup, compiled: jax.stages.Compiled, processes: int) -> StepTime:
    """The step's time from its program and what is known of the device.

    Raises:
        NoPrediction: of this device, or this way of using it, nothing is known.
    """
    device, mesh = session.mesh.devices.flat[0], dict(session.mesh.shape)
    if device.platform == "cpu":
        if _shared(session):
            share = f"{session.mesh.size} devices share this CPU" if processes == 1 else "processes may share this CPU"
            raise NoPrediction(f"{share}, and podling foretells a CPU that is one device")
        from podling.cost.cpu import cpu_step_time
        from podling.cost.cpu_peaks import measure_cpu

        program = read_program(compiled.as_text() or "")
        memory: Any = compiled.memory_analysis()  # None where the back end has none
        return cpu_step_time(program, measure_cpu(program), mesh, memory.temp_size_in_bytes if memory else 0)
    from podling.chips import chip_of

    chip = chip_of(device.device_kind)
    if chip is None:
        raise NoPrediction(f"{device.device_kind} is not in podling's table of chips")
    together = joined(list(session.mesh.devices.flat))
    if device.platform == "tpu":
        from podling.cost.step_time import step_time

        return step_time(read_program(compiled.as_text() or ""), chip, mesh, slices=session.mesh.size // together)
    from podling.cost.analytic import estimate_time

    train, plan = session.config.train, session.plan
    layout = Layout(mesh_text(mesh), plan.micro_batch, plan.micro_steps, train.remat, train.loss_chunk)
    return estimate_time(session.config, layout, session.mesh.size, chip, session.dtype.itemsize, together)


def _record(time: StepTime, tokens: int) -> dict[str, Any]:
    return {
        "step_s": time.step_s,
        "step_s_range": list(time.range_s),
        "tokens_per_s": tokens / time.step_s,
        "parts_s": {kind: time.parts_s.get(kind, 0.0) for kind in KINDS},
        "calibration": time.calibration,
    }
