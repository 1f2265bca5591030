"""How fast this machine trains, loads and generates, against what it can do at best."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax

from podling.config import Config
from podling.cost.cpu_load import BUSY_SHARE, OtherWork, cores_here
from podling.cost.hbm import MemoryStats, memory_stats
from podling.cost.records import StepTime
from podling.cost.refusal import read_refusal
from podling.data.batches import Batch
from podling.errors import InputError, Problem, RunError
from podling.measure.generation import GenerationSpeed, measure_generation
from podling.measure.loader import batches_of, loader_tokens_per_s, made_up
from podling.measure.peaks import Peaks, measure_peaks
from podling.measure.steps import Steps, Taken
from podling.model.spec import param_count
from podling.train.prediction import LESS_MEMORY, NoPrediction, predict_step
from podling.train.setup import Setup

WARM_UP = 2  # steps before the clock
MOST_STEPS = 10_000
LOADER_S = 1.0
PROMPTS = (1, 8)
WAITS = 0.02
"""Share of the steps' time above which waiting for data is what has to be said."""


@dataclass(frozen=True)
class StepSpeed:
    """Training steps, their batches out of shards."""

    steps: int
    step_s: float  # median
    least_s: float
    most_s: float
    wait_share: float  # of the time of all of them
    compile_s: float
    memory: MemoryStats | None  # of one device, as the compiler says it
    loss: float  # of the last, nats per token


@dataclass(frozen=True)
class Bench:
    """Everything that was measured."""

    setup: Setup
    peaks: Peaks
    step: StepSpeed
    predicted: StepTime | None
    """The step's parts, from its program; None where podling knows no way to tell."""
    unknown: str
    """Why it does not."""
    loader_tokens_per_s: float
    generation: tuple[GenerationSpeed, ...]
    others: float | None
    """Cores that other programs kept busy meanwhile; None where the system does not say."""

    @property
    def tokens_per_s(self) -> float:
        return self.setup.plan.tokens / self.step.step_s

    @property
    def flops_per_s(self) -> float:
        """Of the model, of one device."""
        return self.setup.flops_per_step / self.step.step_s / self.setup.mesh.size

    @property
    def mfu(self) -> float:
        """Of the measured peak of matrix products."""
        return self.flops_per_s / self.peaks.flops_per_s

    @property
    def disturbed(self) -> bool:
        return self.others is not None and self.others > BUSY_SHARE * len(cores_here())

    @property
    def bound(self) -> str:
        """What training would have to be rid of to be faster: `data`, or a kind of work, or `unknown`."""
        if self.step.wait_share > WAITS:
            return "data"
        if self.predicted is None:
            return "matmul" if self.mfu > 0.5 else "unknown"
        return max(self.predicted.parts_s, key=lambda kind: self.predicted.parts_s[kind])  # type: ignore[union-attr]

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        setup, published = self.setup, self.peaks.published
        return {
            "device": setup.devices[0].device_kind,
            "devices": setup.mesh.size,
            "mesh": dict(setup.mesh.shape),
            "dtype": setup.dtype.name,
            "params": param_count(setup.config.model),
            "batch": {**asdict(setup.plan), "tokens": setup.plan.tokens},
            "choices": {choice.field: choice.value for choice in setup.choices},
            "peak_flops_per_s": self.peaks.flops_per_s,
            "peak_source": self.peaks.flops_source,
            "published_flops_per_s": published.flops_per_s if published else None,
            "read_bytes_per_s": self.peaks.read_bytes_per_s,
            "step": asdict(self.step) | {"memory_bytes": self.step.memory.total_bytes if self.step.memory else None},
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "predicted_step_s": self.predicted.step_s if self.predicted else None,
            "predicted_parts_s": self.predicted.parts_s if self.predicted else None,
            "no_prediction": self.unknown,
            "bound": self.bound,
            "loader_tokens_per_s": self.loader_tokens_per_s,
            "generation": [{**asdict(one), "read_share": one.read_share} for one in self.generation],
            "others_cores": self.others,
            "disturbed": self.disturbed,
        }


def bench(config: Config, seconds: float, status: Callable[[str], Any]) -> Bench:
    """Measure this process's devices.

    Args:
        config: resolved (`vocab_size`, `steps` known).
        seconds: for training steps; one is taken in any case.
        status: gives a context that shows what is being done.

    Raises:
        InputError: the device asked for is not there, or mesh and batch do not fit it.
        RunError: the devices have too little memory.
    """
    with status("starting JAX"):
        setup = Setup.of(config)
    with tempfile.TemporaryDirectory(prefix="podling-bench-") as folder:
        batches = batches_of(made_up(Path(folder), setup), setup)
        with jax.set_mesh(setup.mesh), closing(batches.iterate()) as coming:
            with status("compiling the training step"):
                steps = _compiled(setup, coming)
            others = OtherWork()
            with status(f"taking steps for {seconds:g} s"):
                taken = steps.take(WARM_UP)[-1:] + steps.take(MOST_STEPS, time.perf_counter() + seconds)
        with status("measuring the loader, matrix products and memory"):
            loaded = loader_tokens_per_s(batches, LOADER_S)
            peaks = measure_peaks(setup.devices, setup.dtype)
            predicted, unknown = _predicted(setup, steps)
    step = _speed(steps, taken)
    params, cfg = steps.state.params, setup.config.model
    del steps  # and the optimizer's state with it
    with status("generating"):
        generation = tuple(measure_generation(params, cfg, prompts, setup.devices[0]) for prompts in PROMPTS)
    return Bench(setup, peaks, step, predicted, unknown, loaded, generation, others.cores())


def _compiled(setup: Setup, coming: Iterator[Batch]) -> Steps:
    try:
        return Steps(setup, coming)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(Problem("the training step", read_refusal(str(error), 0).words, LESS_MEMORY)) from error


def _speed(steps: Steps, taken: list[Taken]) -> StepSpeed:
    times = [after.done_s - before.done_s for before, after in pairwise(taken)]
    waits = [one.wait_s for one in taken[1:]]
    return StepSpeed(
        steps=len(times),
        step_s=median(times),
        least_s=min(times),
        most_s=max(times),
        wait_share=sum(waits) / sum(times),
        compile_s=steps.compile_s,
        memory=memory_stats(steps.compiled) if steps.compiled.memory_analysis() else None,
        loss=taken[-1].loss,
    )


def _predicted(setup: Setup, steps: Steps) -> tuple[StepTime | None, str]:
    try:
        return predict_step(setup, steps.compiled, processes=1), ""
    except (NoPrediction, InputError) as why:
        return None, str(why)
