"""Compiled programs kept between sessions, checked before they are trusted.

JAX's persistent compilation cache saves a resumed session the compile time. It writes its files in place and checks
little when it reads them: a kill in the middle of a write leaves a torn entry, reported and compiled anew at every
start from then on, and a flipped bit has been seen to load and compute NaN without a word.
"""

import hashlib
import json
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from podling.errors import InputError
from podling.files import atomic_write, read_json

HASHES = "hashes.json"
WORTH_S = 0.5  # programs that compile faster are not kept


class CompileCache:
    """Opens the cache for this process; entries that were not sealed, or have changed since, are removed.

    Args:
        folder: of the cache, used by one run at a time.
        owner: this process is the run's first, the only one for which JAX writes entries; it checks and seals them, and
            the others open the folder when that is done.
    """

    def __init__(self, folder: Path, *, owner: bool = True):
        self.folder = Path(folder)
        self._owner = owner
        known = self._read()
        for path in self._entries() if owner else []:
            if known.get(path.name) != _sha256(path):
                path.unlink()
        # A full disk costs a recompilation and is told where it matters, by the checkpoints.
        warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
        compilation_cache.reset_cache()  # JAX opens a folder once; this may be the second run of a notebook's process
        jax.config.update("jax_compilation_cache_dir", str(self.folder.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_S)

    def seal(self) -> None:
        """Remember the entries written since; to be called when a compilation is done.

        Raises:
            RunError: the disk is full.
        """
        if not self._owner:
            return
        known = self._read()
        found = {path.name: known.get(path.name) or _sha256(path) for path in self._entries()}
        if found != known:
            atomic_write(self.folder / HASHES, json.dumps(found, indent=1, sort_keys=True))

    def _entries(self) -> list[Path]:
        names = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [path for path in names if path.is_file() and path.name != HASHES]

    def _read(self) -> dict[str, str]:
        try:
            return read_json(self.folder / HASHES)
        except InputError:  # new, or damaged: then nothing is trusted
            return {}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
