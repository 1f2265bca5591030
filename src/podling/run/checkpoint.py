"""Checkpoints that survive kill -9, a full disk and a corrupt file.

Layout: `checkpoints/<step>/state/` is what Orbax wrote, `checkpoints/<step>/manifest.json` says what must be in it.
A step is written as `<step>.partial`, hashed, synced and then renamed, so a visible step is complete by construction;
the manifest is there because Orbax restores a flipped bit without a word.

Several processes share the folder: each writes and reads its own parts of the arrays, process 0 does the rest. Every
method that speaks of `hosts` is called by all of them in the same order, and raises in all of them or in none.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from podling.errors import Problem, RunError
from podling.hosts.hosts import ALONE, Hosts, broadcast, exchange
from podling.run import manifest
from podling.run.environment import environment
from podling.run.meeting import Meetings, cause_of
from podling.run.quiet import quiet_orbax
from podling.run.restore import STATE, restore_good
from podling.run.steps import PARTIAL, StepFolders

CHUNK_BYTES = 4 << 20
"""An array is read in whole chunks: were a chunk what one device wrote, a process would read all of a leaf that one
device had held, for whatever part of it."""


class Checkpoints:
    """The checkpoints of one run. Reading needs nothing; writing needs the run's lock (see `RunFolder`).

    Args:
        folder: RUN/checkpoints; made when first written to.
        keep: newest steps kept; the step with the lowest metric is kept besides.
        hosts: the processes that save and restore together.
    """

    def __init__(self, folder: Path, keep: int = 2, hosts: Hosts = ALONE):
        self.folder = Path(folder).absolute()
        self.hosts = hosts
        self._folders = StepFolders(self.folder, keep)
        self._meetings = Meetings(hosts)
        self._orbax = self._new_orbax()
        self._thread: threading.Thread | None = None
        self._partial = self.folder  # of the save under way
        self._error: Exception | None = None

    def steps(self) -> list[int]:
        """Complete steps, oldest first. Whether their bytes are still good is known when one is restored."""
        return self._folders.steps()

    def latest(self) -> int | None:
        """The newest complete step."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the lowest metric, the newest of equals; None when no step has one."""
        return self._folders.best()

    def check_space(self, step_bytes: int) -> None:
        """Refuse to start when the kept steps and the one being written will not fit.

        Args:
            step_bytes: bytes of one saved state, see `state_bytes`.

        Raises:
            RunError: with the bytes needed, the bytes free and the path.
        """
        try:
            problem = self._folders.space_problem(step_bytes)
        except OSError as error:
            raise self._failure(self.folder, cause_of(error)) from error
        if problem is not None:
            raise RunError(problem)

    def save(self, step: int, state: Any, meta: dict[str, Any], *, metric: float | None = None) -> None:
        """Begin to save `state` as `step`; waits first for a save that is still under way.

        Returns once the state is safe from donation: the next step may overwrite its buffers. `steps()` has the step
        when it is complete, and steps no longer kept are then removed. One that is there and good is left alone.

        Args:
            step: optimizer steps done.
            state: pytree of arrays; each process writes the parts it holds.
            meta: JSON-ready facts given back by `restore`; the environment is added.
            metric: what `best()` compares, lower is better.

        Raises:
            RunError: this or the previous save could not be written, by any process.
        """
        self.wait()
        if self._begin(step):
            return
        quiet_orbax()
        self._partial = self.folder / f"{step}{PARTIAL}"
        record = manifest.describe(step, state, meta | {"environment": environment()}, metric)
        try:
            pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), state)
            args = ocp.args.PyTreeSave(state, save_args=pieces)  # pyright: ignore[reportCallIssue]
            self._orbax.save(self._partial / STATE, args=args)
        except Exception as error:
            self._give_up()
            raise self._failure(self._partial, cause_of(error)) from error
        self._thread = threading.Thread(target=self._commit, args=(step, record), name=f"commit {step}")
        self._thread.start()

    def wait(self) -> None:
        """Block until the pending save is complete and visible.

        Raises:
            RunError: some process could not write it; the steps saved before are intact.
        """
        if self._thread is None:
            return
        error = self._join()
        causes = exchange(
            self.hosts, f"writing {self._partial.name}", "" if error is None else cause_of(error), limit_s=None
        )
        if any(causes):
            self._give_up()
            raise self._failure(self._partial, self._meetings.whose(causes)) from error

    def close(self) -> None:
        """Wait for this process's share of the pending save and release Orbax's threads.

        Raises:
            RunError: as `wait`.
        """
        try:
            # Not `wait`: a process that ends because of an error finds nobody to compare notes with.
            if self._thread is not None and (error := self._join()) is not None:
                self._give_up()
                raise self._failure(self._partial, cause_of(error)) from error
        finally:
            self._orbax.close()

    def restore(self, step: int | None, like: Any, say: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        """Read a step whose every byte agrees with its manifest; damaged steps are said and passed over.

        Several processes share the hashing of its files, and of the arrays each reads what its devices will hold.

        Args:
            step: the step to read, or None for the newest; when it is damaged the newest good one is read instead.
            like: pytree of `jax.ShapeDtypeStruct` with shardings: the whole saved state, or the part that is wanted
                (`{"params": ...}` reads parameters without the optimizer's state).
            say: told about each damaged step.

        Returns:
            The state, on the shardings of `like`, and the saved meta.

        Raises:
            InputError: there is no good checkpoint, or it holds other arrays than `like` asks for.
        """
        self.wait()
        return restore_good(self._folders, self.hosts, self._orbax, step, like, say)

    def _begin(self, step: int) -> bool:
        """Process 0 makes the folder to write into; True when a good checkpoint of this step is there already.

        All hear how that went before any of them enters Orbax, whose barriers know no failure.
        """
        there, cause = False, ""
        if self.hosts.is_first:
            try:
                there = self._folders.is_good(step)
                if not there:
                    self._folders.clean()
                    self._folders.begin(step)
            except OSError as error:
                cause = cause_of(error)
        there, cause = broadcast(self.hosts, f"beginning {step}", [there, cause], limit_s=None)
        if cause:
            raise self._failure(self.folder / f"{step}{PARTIAL}", cause)
        self._meetings.begin(step)
        return there

    def _commit(self, step: int, record: dict[str, Any]) -> None:
        """Runs in its own thread: wait for Orbax, seal the step, make it visible, drop what is no longer kept.

        Process 0 hashes all files, also the ones others wrote: only then is a step visible as soon as it is written.
        """
        try:
            self._orbax.wait_until_finished()
        except Exception as error:  # handed to the main thread by wait()
            self._error = error
            self._meetings.miss(cause_of(error))
            return
        try:
            if self.hosts.is_first:
                manifest.seal(self._partial, record)
                self._folders.publish(self._partial, step)
        except Exception as error:  # all barriers are behind us: the others hear of it in wait()
            self._error = error

    def _join(self) -> Exception | None:
        """Wait for `_commit`, and take its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        return error

    def _give_up(self) -> None:
        """After a failed save: an Orbax that failed once repeats its old errors, so a fresh one takes its place."""
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._orbax = self._new_orbax()
        # Other arrays of the same save may still be on their way to the disk and make the folder anew.
        gone = 0
        for _ in range(50 if self.hosts.is_first else 0):
            gone = gone + 1 if not self._partial.exists() else 0
            if gone > 2:
                return
            shutil.rmtree(self._partial, ignore_errors=True)
            time.sleep(0.05)

    def _new_orbax(self) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_compression=False),
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._meetings.barrier),
        )

    def _failure(self, path: Path, cause: str) -> RunError:
        last = self.latest()
        safe = "no checkpoint was saved before" if last is None else f"the checkpoint of step {last} is intact"
        what = f"could not be written: {cause}"
        return RunError(Problem(str(path), what, f"{safe}; repair this and run the same command"))


def state_bytes(like: Any) -> int:
    """Bytes of a pytree of arrays or ShapeDtypeStructs, all devices together, replicas counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))


def hash_state(state: Any) -> str:
    """SHA-256 over the name, dtype, shape and bytes of every leaf: equal exactly when the states are bit-equal.

    The leaves must be addressable from this process.
    """
    return manifest.hash_leaves(state)
