"""Compiled programs kept by content, so that the same question is compiled once."""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import podling
from podling.config import Config
from podling.errors import PodlingError
from podling.files import atomic_write, writing

PROGRAM_SOURCE = (
    "model",
    "tuning.py",
    "kernels.py",
    *(f"parallel/{name}.py" for name in ("axes", "collectives", "mesh", "rules")),
    *(f"train/{name}.py" for name in ("lowering", "optimizer", "schedule", "step")),
)
"""What of podling decides the program."""
READING_SOURCE = ("hlo", "cost", "chips.py", "topology.py")
"""What of podling decides how a program is read."""
FAILURE = "last-failure.txt"
"""What a compiler that died has said last."""
ABANDONED_S = 3600
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a compiler that could not write ends with: on a full disk there is no other way to say it."""
# Numbers that are constants in the program: they change neither its memory nor its time.
CONSTANTS = {
    "optimizer": ("lr", "warmup_steps", "lr_floor", "decay_fraction", "beta1", "beta2", "eps"),
    "train": ("steps", "tokens", "batch_tokens", "micro_batch", "seed", "eval_every", "eval_tokens", "samples"),
}


def default_folder() -> Path:
    """Where plans keep their programs: `$XDG_CACHE_HOME/podling/plan` (`~/.cache/podling/plan`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podling" / "plan"


def program_key(config: Config, job: Mapping[str, Any]) -> str:
    """A name for the program that this job compiles to: of podling's source, the compiler, and what is asked.

    Args:
        config: resolved.
        job: everything else, JSON-ready.
    """
    sections = {name: asdict(getattr(config, name)) for name in ("model", "optimizer", "train")}
    sections["model"].pop("preset")
    for name, fields in CONSTANTS.items():
        for field in fields:
            sections[name].pop(field)
    sections["optimizer"]["clip_norm"] = config.optimizer.clip_norm > 0
    return _hash([source_hash(PROGRAM_SOURCE), _versions(), sections, dict(job)])


@cache
def source_hash(parts: tuple[str, ...]) -> str:
    """Of these files and folders of podling's source."""
    root = Path(podling.__file__).parent
    files = sorted(file for part in parts for file in _files(root / part))
    return _hash([[str(file.relative_to(root)), file.read_text(encoding="utf-8")] for file in files])


def _files(path: Path) -> Iterable[Path]:
    return path.rglob("*.py") if path.is_dir() else [path]


def _versions() -> list[str]:
    found = []
    for name in ("jax", "jaxlib", "libtpu", "optax"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


class Programs:
    """The folder of compiled programs: `KEY/` holds `answer.json`, `program.hlo.gz` and `compiler.txt`.

    A folder that is there is whole: it is made beside its place and renamed. What cannot be read counts as absent.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def tidy(self) -> None:
        """Remove what processes that were killed have left half-made; a younger folder may still be filled."""
        for left in self.folder.glob(".*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left)

    def answer(self, key: str) -> dict[str, Any] | None:
        """What the compiler said; None when it was not asked or its answer is damaged."""
        return self._json(self.folder / key / "answer.json")

    def text(self, key: str) -> str | None:
        """The optimised program; None where there is none or it is damaged."""
        try:
            return gzip.decompress((self.folder / key / "program.hlo.gz").read_bytes()).decode() or None
        except (OSError, EOFError, ValueError, zlib.error):
            return None

    def compiler_text(self, key: str) -> Path:
        """The file with everything that the compiler printed."""
        return self.folder / key / "compiler.txt"

    def reading(self, key: str, how: str) -> dict[str, Any] | None:
        """What was read from the program in this way (a hash of the readers and of what they were told)."""
        return self._json(self.folder / key / f"reading-{how}.json")

    def keep_reading(self, key: str, how: str, record: dict[str, Any]) -> None:
        """Replaces those of other ways: they are of another podling. Where it cannot be kept it is read anew."""
        for old in (self.folder / key).glob("reading-*.json"):
            with contextlib.suppress(OSError):
                old.unlink()
        with contextlib.suppress(PodlingError):
            atomic_write(self.folder / key / f"reading-{how}.json", json.dumps(record))

    @contextlib.contextmanager
    def filling(self, key: str) -> Iterator[Path]:
        """A folder to fill, which becomes that of `key` when the block ends well, and is removed when not.

        Raises:
            RunError: no space.
            InputError: the cache cannot be written.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=self.folder))
        try:
            yield made
            with writing(self.folder / key):
                shutil.rmtree(self.folder / key, ignore_errors=True)
                os.replace(made, self.folder / key)
            with contextlib.suppress(OSError):
                (self.folder / FAILURE).unlink(missing_ok=True)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    @staticmethod
    def _json(path: Path) -> dict[str, Any] | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None
