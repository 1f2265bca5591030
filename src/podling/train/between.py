"""What comes between two steps: an evaluation, a checkpoint, the answer to a signal."""

from collections.abc import Callable
from typing import Any

from podling.errors import Interrupted, Problem
from podling.hosts.waits import COMPILE_S
from podling.run.checkpoint import Checkpoints
from podling.run.compile_cache import CompileCache
from podling.run.folder import RunFolder
from podling.train.evaluate import EvalResult
from podling.train.progress import Reporter
from podling.train.session import Session
from podling.train.step import TrainState
from podling.train.together import Together


class Between:
    """Evaluations and checkpoints of one session of a run.

    Args:
        session: gives the compiled evaluation and the batches.
        folder: the run folder, held by the first process.
        reporter: told of evaluations.
        together: the processes, which all call every method at the same step.
        write: takes a record for metrics.jsonl.
        sync: brings metrics.jsonl to the disk.
        facts: what a checkpoint keeps besides the state.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        reporter: Reporter,
        together: Together,
        *,
        write: Callable[[dict[str, Any]], None],
        sync: Callable[[], None],
        facts: Callable[[], dict[str, Any]],
    ):
        self.session, self.folder, self.reporter, self.together = session, folder, reporter, together
        self._write, self._sync, self._facts = write, sync, facts
        self.checkpoints = Checkpoints(folder.paths.checkpoints, keep=session.config.run.keep, hosts=together.hosts)
        together.waits.ask_for_saved(self.checkpoints.latest)
        self.programs = _open_programs(folder, together)
        self.evaluated: tuple[int, EvalResult] | None = None  # the newest evaluation and its step

    def evaluation(self, state: TrainState, done: int) -> EvalResult:
        """Score the held-out windows after `done` steps, once."""
        if self.evaluated is not None and self.evaluated[0] == done:
            return self.evaluated[1]
        wait = self.together.waits(f"evaluation of step {done}", COMPILE_S)
        with self.reporter.status("evaluating", None) as tell, wait:
            result = self.session.evaluate(state.params, tell)
        self.programs.seal()
        record = {"step": done, **result.record()}
        self._write(record)
        self.reporter.evaluation(record)
        self.evaluated = (done, result)
        return result

    def save(self, state: TrainState, done: int) -> None:
        """Begin a checkpoint; it counts for `best` when this very state was evaluated."""
        self._sync()
        fresh = self.evaluated is not None and self.evaluated[0] == done
        metric = self.evaluated[1].loss if fresh and self.evaluated else None
        # The batch to come, so that a session on other devices can tell whether it goes on with the same ones.
        following = self.session.batches.digest(done) if self.together.is_first else ""
        meta = {"step": done, "evaluated": fresh, "next_batch": following, **self._facts()}
        with self.together.waits(f"checkpoint of step {done}", COMPILE_S):
            self.checkpoints.save(done, state, meta, metric=metric)

    def wait_saved(self, done: int) -> None:
        """Until the checkpoint under way is complete."""
        with self.together.waits(f"checkpoint of step {done}", COMPILE_S):
            self.checkpoints.wait()

    def save_and_stop(self, state: TrainState, done: int, signal_number: int) -> None:
        """Answer a signal.

        Raises:
            Interrupted: always, with what to type to go on.
        """
        self.save(state, done)
        with self.reporter.status("saving before stopping", 5):
            self.wait_saved(done)
        self.stop(done, signal_number)

    def stop(self, done: int, signal_number: int) -> None:
        """Answer a signal when the state after `done` steps is saved.

        Raises:
            Interrupted: always, with what to type to go on.
        """
        problem = Problem(
            f"step {done}",
            "stopped by a signal; everything up to here is saved",
            f"podling train --resume {self.folder.path} goes on",
        )
        raise Interrupted(problem, signal_number)


def _open_programs(folder: RunFolder, together: Together) -> CompileCache:
    """The first process checks the compiled programs before any process loads one."""
    programs = None
    with together.gate("compiled programs"):
        if together.is_first:
            programs = CompileCache(folder.paths.compile_cache)
    return programs or CompileCache(folder.paths.compile_cache, owner=False)
