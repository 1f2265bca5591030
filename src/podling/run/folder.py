"""A run is a folder, written by one process at a time, of one configuration and one data set from start to end."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from podling.config import Config, from_dict, to_dict
from podling.errors import InputError, Problem, RunError
from podling.files import atomic_write, read_json
from podling.run.match import match
from podling.run.summary import read_summary

RUN_VERSION = 1


@dataclass(frozen=True)
class RunPaths:
    """Where things are in a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration, every default filled in."""
        return self.path / "config.json"

    @property
    def facts(self) -> Path:
        """When the run began, and the fingerprints of what it learns from."""
        return self.path / "run.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, as Hugging Face `tokenizers` saves it."""
        return self.path / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, see `MetricsLog`."""
        return self.path / "metrics.jsonl"

    @property
    def prediction(self) -> Path:
        """What a step of the newest session should take, written before its first one."""
        return self.path / "prediction.json"

    @property
    def summary(self) -> Path:
        """What a finished run came to; there is one only then."""
        return self.path / "summary.json"

    @property
    def lock(self) -> Path:
        """Held by the process that writes; the kernel lets go of it when that process dies."""
        return self.path / "lock"

    @property
    def checkpoints(self) -> Path:
        """See `Checkpoints`."""
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """Text the model wrote."""
        return self.path / "samples"

    @property
    def export(self) -> Path:
        """The Hugging Face export."""
        return self.path / "export"

    @property
    def compile_cache(self) -> Path:
        """Compiled programs, for the next session."""
        return self.path / "compile_cache"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"


class RunFolder:
    """A run opened for writing. Use `RunFolder.open`; `close` (or leaving a `with` block) releases the lock.

    Attributes:
        paths: where things are.
        is_new: this session created the run.
        notes: what differs from the last session without being refused, one line each, for the person to read.
    """

    def __init__(self, paths: RunPaths, lock: int, *, is_new: bool, notes: list[str]):
        self.paths = paths
        self.is_new = is_new
        self.notes = notes
        self._lock = lock

    @classmethod
    def open(cls, out: Path, config: Config, fingerprints: dict[str, str]) -> "RunFolder":
        """Create the run, or continue it when it is of the same configuration and data; `keep` saves what differs.

        Args:
            out: the run folder.
            config: resolved: presets expanded, `model.vocab_size` known.
            fingerprints: hashes of what the run learns from, by name, e.g. `{"data": ..., "tokenizer": ...}`.

        Raises:
            InputError: `out` cannot be a folder, holds something else, is being written by another process, or is a
                run of another configuration or other data (every difference named).
        """
        paths = RunPaths(Path(out))
        _make_folder(paths)
        lock = _take_lock(paths)
        try:
            is_new = not paths.config.exists()
            notes = [] if is_new else _match(paths, config, fingerprints)
            if read_summary(paths.summary) is None and paths.summary.exists():
                notes.append(f"{paths.summary} is not a summary; the run's end is done again")
            if is_new:
                began = datetime.now().astimezone().isoformat(timespec="seconds")
                atomic_write(paths.facts, _json({"version": RUN_VERSION, "began": began, "fingerprints": fingerprints}))
                atomic_write(paths.config, _json(to_dict(config)))
        except BaseException:
            os.close(lock)
            raise
        return cls(paths, lock, is_new=is_new, notes=notes)

    @classmethod
    def of_first(cls, out: Path) -> "RunFolder":
        """The run as the processes beside the first see it: that one made it, and holds the lock for all."""
        return cls(RunPaths(Path(out)), -1, is_new=False, notes=[])

    @property
    def path(self) -> Path:
        """The folder."""
        return self.paths.path

    @property
    def finished(self) -> bool:
        """All steps are done and the summary is written."""
        return read_summary(self.paths.summary) is not None

    @property
    def summary(self) -> dict[str, Any] | None:
        """What `mark_finished` was given, with paths as they are now; None before that, and when it is damaged."""
        found = read_summary(self.paths.summary)
        if found is None:
            return None
        export = str(self.paths.export) if self.paths.export.exists() else None
        return {**found, "run": str(self.path), "export": export}

    def keep(self, config: Config) -> None:
        """Save what this session changed, once all of it is accepted: until then the run has its last session's."""
        if load_run(self.path)[0] != config:
            atomic_write(self.paths.config, _json(to_dict(config)))

    def mark_finished(self, summary: dict[str, Any]) -> None:
        """Write the summary: from now on the same command prints it and does nothing else."""
        atomic_write(self.paths.summary, _json(summary))

    def withdraw(self) -> None:
        """Undo `open` for a new run that could not begin, so that the corrected command may use the same folder."""
        if not self.is_new or self.paths.metrics.exists():
            return
        for path in (self.paths.config, self.paths.facts, self.paths.tokenizer):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            self.paths.checkpoints.rmdir()
        shutil.rmtree(self.paths.compile_cache, ignore_errors=True)
        if not [entry for entry in self.path.iterdir() if entry != self.paths.lock]:
            self.paths.lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_run(path: Path) -> tuple[Config, RunPaths]:
    """A run's configuration and where its things are, for reading; nothing is locked or changed.

    Raises:
        InputError: there is no run at `path`, or its config.json is broken.
    """
    paths = RunPaths(Path(path))
    if not paths.config.is_file():
        what = "is not a run folder: it has no config.json" if paths.path.is_dir() else "there is no such run"
        near = sorted(str(found.parent) for found in paths.path.parent.glob("*/config.json"))
        known = "runs beside it: " + ", ".join(near) if near else "a run folder is what podling train or import wrote"
        raise InputError(Problem(str(path), what, known))
    return from_dict(read_json(paths.config), str(paths.config)), paths


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _make_folder(paths: RunPaths) -> None:
    """Refuse before anything is written: a file in the way, or a folder that holds something else."""
    out = paths.path
    try:
        out.mkdir(parents=True, exist_ok=True)
        inside = sorted(entry.name for entry in out.iterdir())
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(Problem(f"--out {out}", "is a file, or lies below one", "choose another --out")) from error
    except OSError as error:
        raise RunError(
            Problem(f"--out {out}", f"cannot be created: {error.strerror}", "choose another --out")
        ) from error
    # What a session leaves that was killed or refused while it created the run; the writer's temporary files are dots.
    own = (paths.lock.name, paths.facts.name, paths.compile_cache.name)
    foreign = [name for name in inside if name not in own and not name.startswith(".")]
    if foreign and not paths.config.exists():
        some = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise InputError(Problem(f"--out {out}", f"is not a run and not empty ({some})", "choose a new folder"))


def _take_lock(paths: RunPaths) -> int:
    handle = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(handle)
        fix = "wait for it, stop it, or choose another --out"
        raise InputError(Problem(f"--out {paths.path}", f"this run is being written by {holder}", fix)) from error
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    os.truncate(handle, 0)
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only the words are missing
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)
    return handle


def _match(paths: RunPaths, config: Config, fingerprints: dict[str, str]) -> list[str]:
    facts = read_json(paths.facts) if paths.facts.exists() else {}
    return match(str(paths.path), load_run(paths.path)[0], config, facts.get("fingerprints", {}), fingerprints)
