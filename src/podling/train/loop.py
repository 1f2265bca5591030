"""The host loop: it owns the clock, the signals and the files; the devices own the numbers.

The loop never waits for the step it has just dispatched: metrics are read one step late, so the device always has the
next step queued.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from podling.config import Config
from podling.data.batches import Batch
from podling.data.shards import Prepared
from podling.errors import Problem, RunError
from podling.hosts.waits import COMPILE_S, STEP_S
from podling.run.checkpoint import state_bytes
from podling.run.folder import RunFolder
from podling.run.metrics import MetricsLog
from podling.train.baselines import Baseline, baselines
from podling.train.beginning import first_state
from podling.train.between import Between
from podling.train.devices import open_session
from podling.train.finish import finish
from podling.train.flops import flops_per_token
from podling.train.meter import Meter
from podling.train.prediction import Forecast, compile_and_foretell, for_summary
from podling.train.progress import Reporter
from podling.train.session import Session
from podling.train.signals import AgreedStop, StopRequest
from podling.train.step import StepMetrics, TrainState
from podling.train.together import Together


def run(
    config: Config, prepared: Prepared, folder: RunFolder, reporter: Reporter, began_s: float, together: Together
) -> dict[str, Any]:
    """Train from the newest checkpoint of `folder`, or from the start, to the end; returns the summary.

    Args:
        config: resolved.
        prepared: the run's data.
        folder: the run folder, held by the first process.
        reporter: told everything a person would want to know.
        began_s: when this session's work began, on `time.perf_counter`.
        together: the processes, which all call this.

    Raises:
        InputError: devices, mesh or batch do not fit.
        RunError: the run could not go on; what was saved is intact.
        Interrupted: a signal stopped the run after saving.
    """
    session = open_session(config, prepared, reporter, together)
    with together.gate("keeping the configuration"):
        if together.is_first:
            folder.keep(config)
    with jax.set_mesh(session.mesh), Run(session, folder, reporter, began_s, together) as this:
        return this.to_the_end()


@dataclass
class Pending:
    """A dispatched step whose metrics have not been read."""

    step: int  # counted from 1: updates made once it is done
    metrics: StepMetrics
    wait_s: float


class Run:
    """One process's share of a run, from the newest checkpoint to the end or the next cut."""

    def __init__(self, session: Session, folder: RunFolder, reporter: Reporter, began_s: float, together: Together):
        self.session, self.folder, self.reporter, self.together = session, folder, reporter, together
        self.config = session.config
        self.total_steps = session.config.train.steps
        self.began_s = began_s
        self.wall_s_before = 0.0  # of earlier sessions
        self.resumed_evaluated = True  # the restored step's evaluation is done, or there is none
        peak = session.peak.flops_per_s
        peak_all = None if peak is None else peak * session.mesh.size
        self.meter = Meter(session.plan.tokens, flops_per_token(self.config.model), peak_all)
        self.between = Between(session, folder, reporter, together, write=self.write, sync=self.sync, facts=self.facts)
        self.log: MetricsLog | None = None  # the first process has one
        self.pending: Pending | None = None
        self.forecast: Forecast | None = None  # of the first process, once the step is compiled

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.between.checkpoints.close()

    def to_the_end(self) -> dict[str, Any]:
        """Restore or initialise, train what is left, evaluate, and finish."""
        like = self.session.abstract_state()
        with self.together.gate("space for checkpoints"):
            if self.together.is_first:
                self.between.checkpoints.check_space(state_bytes(like))
        self.reporter.say(f"checkpoints: {self.folder.paths.checkpoints}, {state_bytes(like) / 1e6:,.1f} MB each")
        state, meta = first_state(self.session, self.between.checkpoints, self.reporter, self.together)
        start, self.resumed_evaluated, self.wall_s_before = meta["step"], meta["evaluated"], meta["wall_s"]
        if "meter" in meta:
            self.meter.restore(meta["meter"])
        baseline = self.baseline()
        self.reporter.begin(self.total_steps, start, baseline)
        with contextlib.ExitStack() as stack:
            if self.together.is_first:
                log = MetricsLog(self.folder.paths, self.config, restored_step=start, say=self.reporter.say)
                self.log = stack.enter_context(log)
            stop = AgreedStop(stack.enter_context(StopRequest()), self.together)
            state = self.steps(state, start, stop)
            result = self.between.evaluation(state, self.total_steps)
            self.between.save(state, self.total_steps)
            self.between.wait_saved(self.total_steps)
            if (number := stop.last()) is not None:
                self.between.stop(self.total_steps, number)
        figures = {
            **result.record(),
            **dataclasses.asdict(baseline),
            **self.meter.totals(),
            "train_s": self.meter.train_s,
            "prediction": for_summary(self.forecast, self.meter, self.folder),
        }
        return finish(self.session, self.folder, self.reporter, state.params, figures, self.wall_s, self.together)

    def baseline(self) -> Baseline:
        """Counted by the first process, while the others wait."""
        found = None
        with self.together.gate("counting unigrams and bigrams"):
            if self.together.is_first:
                found = dataclasses.asdict(baselines(self.session, self.folder, self.reporter))
        return Baseline(**self.together.broadcast("unigrams and bigrams", found))

    def steps(self, state: TrainState, start: int, stop: AgreedStop) -> TrainState:
        """Run the optimizer steps from `start`, evaluating and saving when due."""
        if start >= self.total_steps:
            return state
        if not self.resumed_evaluated and _due(start, self.config.train.eval_every):
            self.between.evaluation(state, start)  # a signal came before it could be done
        programs = self.between.programs
        self.forecast = compile_and_foretell(self.session, programs, self.folder, self.reporter, self.together)
        with closing(self.session.batches.iterate(start)) as batches:
            state = self.first_step(state, start, batches)
            return self.go_on(state, start + 1, batches, stop)

    def go_on(self, state: TrainState, start: int, batches: Iterator[Batch], stop: AgreedStop) -> TrainState:
        """The steps after `start`, to the last of the run, with what is due between them."""
        for done in range(start, self.total_steps + 1):
            at_end = done == self.total_steps
            number = None if at_end else stop.poll()
            evaluate = not at_end and number is None and _due(done, self.config.train.eval_every)
            save = not at_end and _due(done, self.config.run.checkpoint_every)
            if evaluate or save or at_end or number is not None:
                self.settle()
                if evaluate:
                    self.between.evaluation(state, done)
                if number is not None:
                    self.between.save_and_stop(state, done, number)
                if save:
                    self.between.save(state, done)
                self.meter.resume()
            if not at_end:
                state = self.step(state, done, batches)
        return state

    def first_step(self, state: TrainState, start: int, batches: Iterator[Batch]) -> TrainState:
        """The step for which batches and memory are first fetched; it is not timed."""
        self.meter.pause()
        state = self.step(state, start, batches)
        self.settle(COMPILE_S)
        return state

    def step(self, state: TrainState, done: int, batches: Iterator[Batch]) -> TrainState:
        """Dispatch the step after `done` steps, then read the metrics of the one before it."""
        asked_s = time.perf_counter()
        batch = next(batches)
        wait_s = time.perf_counter() - asked_s
        retraces = self.session.counter.retraces
        state, metrics = self.session.step(state, batch)
        if self.session.counter.retraces > retraces:
            self.reporter.say(f"step {done + 1} was traced again: {self.session.counter.last_change()}")
        self.settle()
        self.pending = Pending(done + 1, metrics, wait_s)
        return state

    def settle(self, limit_s: float = STEP_S) -> None:
        """Read the pending step's metrics, log them, and stop the run if they are not finite.

        Args:
            limit_s: how long the step may take, the other processes' part included.

        Raises:
            RunError: naming the step and the documents of its batch.
        """
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        with self.together.waits(f"step {pending.step}", limit_s):
            metrics = jax.device_get(pending.metrics)
        self.meter.step(pending.wait_s)
        step_s = self.meter.step_s
        record = {
            "step": pending.step,
            "loss": float(metrics.loss),
            "lr": float(metrics.lr),
            "grad_norm": float(metrics.grad_norm),
            "tokens": pending.step * self.session.plan.tokens,
            **self.meter.speed(step_s),
            "data_wait_share": self.meter.data_wait_share,
            "left_s": None if step_s is None else (self.total_steps - pending.step) * step_s,
            "elapsed_s": self.wall_s(),
            "retraces": self.session.counter.retraces,
        }
        self.write(record)
        self.reporter.step(record)
        if not bool(metrics.finite):
            self.stop_non_finite(pending.step, record)

    def stop_non_finite(self, step: int, record: dict[str, Any]) -> None:
        """End the run: the state is still good, and the same batch would fail again."""
        documents = self.session.batches.documents(step - 1)
        shown = ", ".join(documents[:8]) + (f" and {len(documents) - 8} more" if len(documents) > 8 else "")
        self.between.wait_saved(step)  # one may be on its way
        last = self.between.checkpoints.latest()
        kept = f"the checkpoint of step {last} is good" if last is not None else "no checkpoint was due before it"
        raise RunError(
            Problem(
                f"step {step}",
                f"loss {record['loss']}, gradient norm {record['grad_norm']}: not finite; its batch held {shown}",
                f"{kept}; look at these documents, or lower --lr (now {self.config.optimizer.lr:g}) in a new --out",
            )
        )

    def write(self, record: dict[str, Any]) -> None:
        """Add to metrics.jsonl, in the first process."""
        if self.log is not None:
            self.log.write(record)

    def sync(self) -> None:
        """Bring metrics.jsonl to the disk, in the first process."""
        if self.log is not None:
            self.log.sync()

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of this session."""
        return {"meter": self.meter.state(), "wall_s": self.wall_s(), "layout": self.session.layout}

    def wall_s(self) -> float:
        """Seconds of work on this run, all sessions together."""
        return self.wall_s_before + time.perf_counter() - self.began_s


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
