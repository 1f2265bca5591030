"""The host loop: it owns the clock, the signals and the files; the devices own the numbers.

The loop never waits for the step it has just dispatched: metrics are read one step late, so the device always has the
next step queued.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from podling.config import Config
from podling.data.batches import Batch
from podling.data.shards import Prepared
from podling.errors import Interrupted, Problem, RunError
from podling.run.checkpoint import Checkpoints, state_bytes
from podling.run.compile_cache import CompileCache
from podling.run.environment import environment_changes
from podling.run.folder import RunFolder
from podling.run.metrics import MetricsLog
from podling.train.baselines import baselines
from podling.train.evaluate import EvalResult
from podling.train.finish import finish
from podling.train.flops import flops_per_token
from podling.train.initial import initial_params
from podling.train.meter import Meter
from podling.train.progress import Reporter
from podling.train.session import Session
from podling.train.signals import StopRequest
from podling.train.step import StepMetrics, TrainState


def run(config: Config, prepared: Prepared, folder: RunFolder, reporter: Reporter, began_s: float) -> dict[str, Any]:
    """Train from the newest checkpoint of `folder`, or from the start, to the end; returns the summary.

    Args:
        config: resolved.
        prepared: the run's data.
        folder: the run folder, held by this process.
        reporter: told everything a person would want to know.
        began_s: when this session's work began, on `time.perf_counter`.

    Raises:
        InputError: devices, mesh or batch do not fit.
        RunError: the run could not go on; what was saved is intact.
        Interrupted: a signal stopped the run after saving.
    """
    session = Session.open(config, prepared, reporter)
    with jax.set_mesh(session.mesh), Run(session, folder, reporter, began_s) as this:
        return this.to_the_end()


@dataclass
class Pending:
    """A dispatched step whose metrics have not been read."""

    step: int  # counted from 1: updates made once it is done
    metrics: StepMetrics
    wait_s: float


class Run:
    """One process's share of a run, from the newest checkpoint to the end or the next cut."""

    def __init__(self, session: Session, folder: RunFolder, reporter: Reporter, began_s: float):
        config = session.config
        self.session, self.folder, self.reporter = session, folder, reporter
        self.config = config
        self.total_steps = config.train.steps
        self.began_s = began_s
        self.wall_s_before = 0.0  # of earlier sessions
        self.resumed_evaluated = True  # the restored step's evaluation is done, or there is none
        self.checkpoints = Checkpoints(folder.paths.checkpoints, keep=config.run.keep)
        self.programs = CompileCache(folder.paths.compile_cache)
        peak = session.peak.flops_per_s
        peak_all = None if peak is None else peak * session.mesh.size
        self.meter = Meter(session.plan.tokens, flops_per_token(config.model), peak_all)
        self.evaluated: tuple[int, EvalResult] | None = None  # the newest evaluation and its step
        self.pending: Pending | None = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoints.close()

    def to_the_end(self) -> dict[str, Any]:
        """Restore or initialise, train what is left, evaluate, and finish."""
        like = self.session.abstract_state()
        self.checkpoints.check_space(state_bytes(like))
        self.reporter.say(f"checkpoints: {self.folder.paths.checkpoints}, {state_bytes(like) / 1e6:,.1f} MB each")
        state, start = self.restore(like)
        baseline = baselines(self.session, self.folder, self.reporter)
        self.reporter.begin(self.total_steps, start, baseline)
        with MetricsLog(self.folder.paths, self.config, restored_step=start, say=self.reporter.say) as self.log:
            with StopRequest() as self.stop:
                state = self.steps(state, start)
                result = self.evaluation(state, self.total_steps)
                self.save(state, self.total_steps)
                self.checkpoints.wait()
                self.answer_signal(self.total_steps)
        figures = {
            **result.record(),
            **dataclasses.asdict(baseline),
            **self.meter.totals(),
            "train_s": self.meter.train_s,
        }
        return finish(self.session, self.folder, self.reporter, state.params, figures, self.wall_s)

    def restore(self, like: TrainState) -> tuple[TrainState, int]:
        """The newest good checkpoint, or the initial state."""
        if self.checkpoints.latest() is None:
            state = self.session.init_state()
            if self.config.run.init:
                params = initial_params(Path(self.config.run.init), like.params, self.reporter)
                state = TrainState(step=state.step, params=params, opt_state=state.opt_state)
            return state, 0
        state, meta = self.checkpoints.restore(None, like, self.reporter.say)
        self.meter.restore(meta["meter"])
        self.resumed_evaluated = meta["evaluated"]
        self.wall_s_before = meta["wall_s"]
        self.reporter.say(f"resuming after step {meta['step']:,} of {self.total_steps:,}")
        changes = environment_changes(meta)
        if changes:
            self.reporter.say("not bit-equal to an unbroken run from here on: " + "; ".join(changes))
        return state, meta["step"]

    def steps(self, state: TrainState, start: int) -> TrainState:
        """Run the optimizer steps from `start`, evaluating and saving when due."""
        if start >= self.total_steps:
            return state
        if not self.resumed_evaluated and _due(start, self.config.train.eval_every):
            self.evaluation(state, start)  # a signal came before it could be done
        with closing(self.session.batches.iterate(start)) as batches:
            state = self.first_step(state, start, batches)
            for done in range(start + 1, self.total_steps + 1):
                at_end = done == self.total_steps
                evaluate = not at_end and _due(done, self.config.train.eval_every)
                save = not at_end and _due(done, self.config.run.checkpoint_every)
                if evaluate or save or at_end or self.stop.signal_number is not None:
                    self.settle()
                    self.between_steps(state, done, evaluate=evaluate, save=save)
                    self.meter.resume()
                if not at_end:
                    state = self.step(state, done, batches)
        return state

    def first_step(self, state: TrainState, start: int, batches: Iterator[Batch]) -> TrainState:
        """The step that compiles; it is not timed."""
        about_s = 5 if self.session.mesh.devices.flat[0].platform == "cpu" else 40
        with self.reporter.status("compiling the training step", about_s):
            self.meter.pause()
            state = self.step(state, start, batches)
            self.settle()
        self.programs.seal()
        return state

    def step(self, state: TrainState, done: int, batches: Iterator[Batch]) -> TrainState:
        """Dispatch the step after `done` steps, then read the metrics of the one before it."""
        asked_s = time.perf_counter()
        batch = next(batches)
        wait_s = time.perf_counter() - asked_s
        retraces = self.session.counter.retraces
        with jax.transfer_guard("disallow"):
            state, metrics = self.session.step(state, batch)
        if self.session.counter.retraces > retraces:
            self.reporter.say(f"step {done + 1} was traced again: {self.session.counter.last_change()}")
        self.settle()
        self.pending = Pending(done + 1, metrics, wait_s)
        return state

    def settle(self) -> None:
        """Read the pending step's metrics, log them, and stop the run if they are not finite.

        Raises:
            RunError: naming the step and the documents of its batch.
        """
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
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
        self.log.write(record)
        self.reporter.step(record)
        if not bool(metrics.finite):
            self.stop_non_finite(pending.step, record)

    def stop_non_finite(self, step: int, record: dict[str, Any]) -> None:
        """End the run: the state is still good, and the same batch would fail again."""
        documents = self.session.batches.documents(step - 1)
        shown = ", ".join(documents[:8]) + (f" and {len(documents) - 8} more" if len(documents) > 8 else "")
        self.checkpoints.wait()  # one may be on its way
        last = self.checkpoints.latest()
        kept = f"the checkpoint of step {last} is good" if last is not None else "no checkpoint was due before it"
        raise RunError(
            Problem(
                f"step {step}",
                f"loss {record['loss']}, gradient norm {record['grad_norm']}: not finite; its batch held {shown}",
                f"{kept}; look at these documents, or lower --lr (now {self.config.optimizer.lr:g}) in a new --out",
            )
        )

    def between_steps(self, state: TrainState, done: int, *, evaluate: bool, save: bool) -> None:
        """What is due after `done` steps, and the answer to a signal."""
        number = self.stop.signal_number
        if evaluate and number is None:
            self.evaluation(state, done)
        if save or number is not None:
            self.save(state, done)
        if number is not None:
            with self.reporter.status("saving before stopping", 5):
                self.checkpoints.wait()
            self.answer_signal(done)

    def answer_signal(self, done: int) -> None:
        """Stop, if a signal asked for it; the state after `done` steps is saved.

        Raises:
            Interrupted: with what to type to go on.
        """
        number = self.stop.signal_number
        if number is not None:
            raise Interrupted(
                Problem(
                    f"step {done}",
                    "stopped by a signal; everything up to here is saved",
                    f"podling train --resume {self.folder.path} goes on",
                ),
                number,
            )

    def evaluation(self, state: TrainState, done: int) -> EvalResult:
        """Score the held-out windows after `done` steps, once."""
        if self.evaluated is not None and self.evaluated[0] == done:
            return self.evaluated[1]
        with self.reporter.status("evaluating", None) as tell:
            result = self.session.evaluate(state.params, tell)
        self.programs.seal()
        record = {"step": done, **result.record()}
        self.log.write(record)
        self.reporter.evaluation(record)
        self.evaluated = (done, result)
        return result

    def save(self, state: TrainState, done: int) -> None:
        """Begin a checkpoint; it counts for `best` when this very state was evaluated."""
        fresh = self.evaluated is not None and self.evaluated[0] == done
        metric = self.evaluated[1].loss if fresh and self.evaluated else None
        meta = {"step": done, "evaluated": fresh, "meter": self.meter.state(), "wall_s": self.wall_s()}
        self.checkpoints.save(done, state, meta, metric=metric)

    def wall_s(self) -> float:
        """Seconds of work on this run, all sessions together."""
        return self.wall_s_before + time.perf_counter() - self.began_s


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
