"""The step folders of a run: which are there, which are kept, and how one becomes visible."""

import contextlib
import os
import shutil
from pathlib import Path

from podling.errors import Problem
from podling.files import show_bytes, sync_folder
from podling.run import manifest

PARTIAL = ".partial"


class StepFolders:
    """`folder/<step>` is a complete checkpoint; every other name below `folder` ends in `.partial` and may go.

    Args:
        folder: RUN/checkpoints.
        keep: newest steps kept; the step with the lowest metric is kept besides.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = max(1, keep)
        self._cleaned = False

    def steps(self) -> list[int]:
        """Complete steps, oldest first. Whether their bytes are still good is known when one is verified."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir())

    def path(self, step: int) -> Path:
        """Where a complete step is."""
        return self.folder / str(step)

    def best(self) -> int | None:
        """The step with the lowest metric, the newest of equals; None when no step has one."""
        scored = []
        for step in self.steps():
            with contextlib.suppress(manifest.Damaged):
                metric = manifest.read(self.path(step))["metric"]
                if metric is not None:
                    scored.append((metric, -step))
        return -min(scored)[1] if scored else None

    def is_good(self, step: int) -> bool:
        """The step is there and every byte of it agrees with its manifest."""
        try:
            manifest.verify(self.path(step))
        except manifest.Damaged:
            return False
        return True

    def clean(self) -> None:
        """Remove, once, what a killed session left half-written. Only for the process that holds the run's lock."""
        if self._cleaned:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(stale)
        self._cleaned = True

    def space_problem(self, step_bytes: int) -> Problem | None:
        """What keeps the steps that will be kept, and the one being written, from fitting on the disk.

        Raises:
            OSError: the folder cannot be used.
        """
        self.clean()
        held_bytes = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        free_bytes = shutil.disk_usage(self.folder).free
        steps = self.keep + 2  # the newest, the best, and the one being written
        needed_bytes = max(step_bytes, steps * step_bytes - held_bytes)
        if needed_bytes <= free_bytes:
            return None
        fewer = ", or keep fewer with --run.keep 1" if self.keep > 1 else ""
        return Problem(
            str(self.folder),
            f"checkpoints need {show_bytes(needed_bytes)} more ({show_bytes(step_bytes)} each, "
            f"up to {steps} at a time), only {show_bytes(free_bytes)} are free",
            f"free some space or choose another --out{fewer}",
        )

    def begin(self, step: int) -> Path:
        """An empty folder to write a step into."""
        partial = self.folder / f"{step}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def publish(self, partial: Path, step: int) -> None:
        """Make a sealed step visible in one rename, then remove what is no longer kept."""
        self.remove(step)  # there is one only when it was damaged
        os.rename(partial, self.path(step))
        sync_folder(self.folder)
        for later in self.steps():
            if later > step:  # left over from a history that was damaged and abandoned
                self.remove(later)
        kept = {*self.steps()[-self.keep :], self.best()}
        for old in self.steps():
            if old not in kept:
                self.remove(old)

    def remove(self, step: int) -> None:
        """Out of sight in one rename, then deleted: a kill in between leaves no half-deleted step visible."""
        if self.path(step).exists():
            doomed = self.folder / f"{step}.removed{PARTIAL}"
            os.rename(self.path(step), doomed)
            shutil.rmtree(doomed)
