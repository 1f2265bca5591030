"""Checkpoints that survive kill -9, a full disk and a corrupt file.

Layout: `checkpoints/<step>/state/` is what Orbax wrote, `checkpoints/<step>/manifest.json` says what must be in it.
A step is written as `<step>.partial`, hashed, synced and then renamed, so a visible step is complete by construction;
the manifest is there because Orbax restores a flipped bit without a word.
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
from jax.experimental import multihost_utils

from podling.errors import InputError, Problem, RunError
from podling.files import show_bytes
from podling.run import manifest
from podling.run.environment import environment
from podling.run.quiet import quiet_orbax
from podling.run.steps import PARTIAL, StepFolders

STATE = "state"


class Checkpoints:
    """The checkpoints of one run. Reading needs nothing; writing needs the run's lock (see `RunFolder`).

    Args:
        folder: RUN/checkpoints; made when first written to.
        keep: newest steps kept; the step with the lowest metric is kept besides.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = Path(folder).absolute()
        self._folders = StepFolders(self.folder, keep)
        self._orbax = _orbax()
        self._thread: threading.Thread | None = None
        self._error: tuple[Path, Exception] | None = None

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
            self._folders.clean()
            held_bytes = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
            free_bytes = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise self._failure(self.folder, error) from error
        steps = self._folders.keep + 2  # the newest, the best, and the one being written
        needed_bytes = max(step_bytes, steps * step_bytes - held_bytes)
        if needed_bytes > free_bytes:
            fewer = ", or keep fewer with --run.keep 1" if self._folders.keep > 1 else ""
            raise RunError(
                Problem(
                    str(self.folder),
                    f"checkpoints need {show_bytes(needed_bytes)} more ({show_bytes(step_bytes)} each, "
                    f"up to {steps} at a time), only {show_bytes(free_bytes)} are free",
                    f"free some space or choose another --out{fewer}",
                )
            )

    def save(self, step: int, state: Any, meta: dict[str, Any], *, metric: float | None = None) -> None:
        """Begin to save `state` as `step`; waits first for a save that is still under way.

        Returns once the state is safe from donation: the next step may overwrite its buffers. The step shows up in
        `steps()` when it is complete, and then steps that are no longer kept are removed. A step that is already there
        and good is left alone: a run has one state per step.

        Args:
            step: optimizer steps done.
            state: pytree of arrays; each process writes the parts it holds.
            meta: JSON-ready facts given back by `restore`; the environment is added.
            metric: what `best()` compares, lower is better.

        Raises:
            RunError: this or the previous save could not be written.
        """
        self.wait()
        if self._folders.is_good(step):
            return
        quiet_orbax()
        partial = self.folder / f"{step}{PARTIAL}"
        record = manifest.describe(step, state, meta | {"environment": environment()}, metric)
        try:
            if jax.process_index() == 0:
                self._folders.clean()
                self._folders.begin(step)
            self._orbax.save(partial / STATE, args=ocp.args.PyTreeSave(state))  # pyright: ignore[reportCallIssue]
        except Exception as error:
            self._give_up(partial)
            raise self._failure(partial, error) from error
        self._thread = threading.Thread(target=self._commit, args=(step, partial, record), name=f"commit {step}")
        self._thread.start()

    def wait(self) -> None:
        """Block until the pending save is complete and visible.

        Raises:
            RunError: it could not be written; the steps saved before are intact.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("podling checkpoint is complete")
        failed, self._error = self._error, None
        if failed is not None:
            self._give_up(failed[0])
            raise self._failure(*failed) from failed[1]

    def close(self) -> None:
        """Wait for the pending save and release Orbax's threads.

        Raises:
            RunError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()

    def restore(self, step: int | None, like: Any, say: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        """Read a step whose every byte agrees with its manifest; damaged steps are said and passed over.

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
        newest_first = self.steps()[::-1]
        if step is not None and step not in newest_first:
            have = ", ".join(map(str, newest_first[::-1])) or "none"
            raise InputError(Problem(str(self.folder), f"has no checkpoint of step {step}", f"there are: {have}"))
        order = newest_first if step is None else [step, *(other for other in newest_first if other != step)]
        damage: list[Problem] = []
        for candidate in order:
            path = self._folders.path(candidate)
            try:
                record = manifest.verify(path)
            except manifest.Damaged as error:
                damage.append(Problem(str(path), f"checkpoint is damaged: {error}"))
                say(f"{damage[-1]}; trying the one before")
                continue
            manifest.check_leaves(path, record, like)
            if damage:
                say(f"restored step {candidate} from {path}")
            return self._read(path / STATE, like), record["meta"]
        if damage:
            raise InputError(
                [*damage, Problem(str(self.folder), "no good checkpoint is left", "train again in a new --out")]
            )
        raise InputError(Problem(str(self.folder), "there is no checkpoint", "train the run first"))

    def _read(self, path: Path, like: Any) -> Any:
        args = ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        return self._orbax.restore(path, args=args)

    def _commit(self, step: int, partial: Path, record: dict[str, Any]) -> None:
        """Runs in its own thread: wait for Orbax, seal the step, make it visible, drop what is no longer kept."""
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                manifest.seal(partial, record)
                self._folders.publish(partial, step)
        except Exception as error:  # handed to the main thread by wait()
            self._error = partial, error

    def _give_up(self, partial: Path) -> None:
        """After a failed save: an Orbax that failed once repeats its old errors, so a fresh one takes its place."""
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._orbax = _orbax()
        # Other arrays of the same save may still be on their way to the disk and make the folder anew.
        gone = 0
        for _ in range(50):
            gone = gone + 1 if not partial.exists() else 0
            if gone > 2:
                return
            shutil.rmtree(partial, ignore_errors=True)
            time.sleep(0.05)

    def _failure(self, path: Path, error: Exception) -> RunError:
        last = self.latest()
        safe = "no checkpoint was saved before" if last is None else f"the checkpoint of step {last} is intact"
        what = f"could not be written: {_cause(error)}"
        return RunError(Problem(str(path), what, f"{safe}; repair this and run the same command"))


def state_bytes(like: Any) -> int:
    """Bytes of a pytree of arrays or ShapeDtypeStructs, all devices together, replicas counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))


def hash_state(state: Any) -> str:
    """SHA-256 over the name, dtype, shape and bytes of every leaf: equal exactly when the states are bit-equal.

    The leaves must be addressable from this process.
    """
    return manifest.hash_leaves(state)


def _orbax() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _cause(error: BaseException) -> str:
    """The operating system's words where they can be found, else the first line of the message."""
    text = str(error)
    for known in ("No space left on device", "File too large", "Disk quota exceeded", "Read-only file system"):
        if known in text:
            return known
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
