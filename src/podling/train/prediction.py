"""A run's step compiled, what it should take foretold from the program, and held against what it took.

The prediction is written to the run folder before the first step, so that nothing measured can have gone into it. It
costs a run nothing but seconds: what goes wrong here is said, and the run goes on without it.
"""

import json
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jax

from podling.cost.records import KINDS, Layout, StepTime
from podling.cost.refusal import read_refusal
from podling.errors import PodlingError, Problem, RunError
from podling.files import atomic_write
from podling.hlo.program import read_program
from podling.hosts.waits import COMPILE_S
from podling.parallel.axes import mesh_text
from podling.run.compile_cache import CompileCache
from podling.run.folder import RunFolder
from podling.train.auto_mesh import joined
from podling.train.progress import Reporter
from podling.train.progress.words import count, predicted
from podling.train.session import Session
from podling.train.together import Together


class NoPrediction(Exception):
    """There is nothing to foretell a step's time with; the argument says why."""


@dataclass(frozen=True)
class Forecast:
    """What was said before the first step of this session: a prediction, or why there is none."""

    facts: dict[str, Any]  # as in prediction.json

    def beside(self, measured_step_s: float | None) -> dict[str, Any]:
        """The record for the summary: the prediction and what this session's steps took.

        Args:
            measured_step_s: mean over this session's timed steps; None when there was none.
        """
        step_s = self.facts.get("step_s")
        known = step_s is not None and measured_step_s is not None
        ratio = measured_step_s / step_s if known else None  # type: ignore[operator]
        return {**self.facts, "measured_step_s": measured_step_s, "measured_over_predicted": ratio}

    @property
    def said(self) -> str:
        """One line of it."""
        if "missing" in self.facts:
            return f"no prediction of the step's time: {self.facts['missing']}"
        parts = sorted(((part_s, kind) for kind, part_s in self.facts["parts_s"].items() if part_s > 0), reverse=True)
        shares = ", ".join(f"{kind} {part_s / self.facts['step_s']:.0%}" for part_s, kind in parts)
        speed = f"{count(self.facts['tokens_per_s'])} tokens/s"
        return f"predicted: {predicted(self.facts)}, {speed} ({shares}); {self.facts['calibration']}"


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
    compile_s = time.perf_counter() - began_s
    programs.seal()
    if not together.is_first:
        return None
    with reporter.status("predicting the step's time", 3):
        forecast = foretell(session, program, together.hosts.count, compile_s)
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
        fix = "a smaller --train.micro-batch, --train.remat full or a --train.loss-chunk needs less"
        words = read_refusal(str(error), 0).words
        raise RunError(Problem("compiling the training step", words, fix)) from error


def foretell(session: Session, program: jax.stages.Compiled, processes: int, compile_s: float) -> Forecast:
    """What `prediction.json` is to hold, of this session; why there is no prediction is part of it.

    Args:
        session: gives devices and batch.
        program: the compiled step.
        processes: of the run.
        compile_s: how long compiling took.
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
        facts |= _record(predict_step(session, program, processes), session.plan.tokens)
    except NoPrediction as why:
        facts["missing"] = str(why)
    except Exception as error:  # the run is worth more than its prediction, whatever went wrong
        facts["missing"] = str(error) if isinstance(error, PodlingError) else f"{type(error).__name__}: {error}"
    facts["prediction_s"] = time.perf_counter() - began_s
    return Forecast(facts)


def predict_step(session: Session, compiled: jax.stages.Compiled, processes: int) -> StepTime:
    """The step's time from its program and what is known of the device.

    Raises:
        NoPrediction: of this device, or this way of using it, nothing is known.
    """
    device, mesh = session.mesh.devices.flat[0], dict(session.mesh.shape)
    if device.platform == "cpu":
        if session.mesh.size > 1:
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
