"""Text to token shards: in bounded memory, on all cores, atomic, resumable, and reused when nothing changed."""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from podling.config import DataConfig
from podling.data.encode import encode_segments
from podling.data.events import Meter, PrepareEvent, Progress
from podling.data.key import data_key
from podling.data.manifest import SETTINGS, make_manifest
from podling.data.scan import Scan, Split, choose_split, hold_nothing_out, scan
from podling.data.sources import Sources, find_sources, is_prepared
from podling.data.spool import spool_hub
from podling.data.tokenizer import Tokenizer
from podling.data.vocabulary import build_tokenizer, check_tokenizer, known_tokenizer
from podling.errors import InputError, Problem, raise_if
from podling.files import atomic_write, file_above, read_json, sync_folder, writing

__all__ = ["PrepareEvent", "cache_folder", "check_data", "is_prepared", "prepare"]


def prepare(
    config: DataConfig, out: Path | None = None, progress: Progress | None = None, *, whole: bool = False
) -> Path:
    """Turn text into a folder of token shards that `Prepared.open` reads.

    The work is done in a hidden folder beside the result, which is renamed when all of it is there. A prepare that was
    killed continues from its finished shards. When a folder for the same text, tokenizer and split exists (judged by
    the hash of every file), it is used as it is.

    Args:
        config: what to read and how; a single prepared folder in `paths` is returned as it is.
        out: the folder to write; None is a folder named by content under `config.cache`.
        progress: told how far it is.
        whole: for text that is only scored: every document goes undivided to the train split, the held-out split is
            empty, and `config.holdout` says nothing. A prepared folder keeps the split that it has.

    Returns:
        The folder.

    Raises:
        InputError: something about the text, the tokenizer or the folder is wrong.
        RunError: the disk is full.
    """
    if len(config.paths) == 1 and is_prepared(config.paths[0]):
        return _given_prepared(config, out, whole)
    sources = check_data(config)
    key = data_key(config, sources, progress, whole)
    final = Path(out) if out is not None else cache_folder(config) / key[:24]
    if out is not None and (blocker := file_above(final)) is not None:
        raise InputError(Problem(str(out), f"cannot be made: {blocker} is a file", "choose a path below a folder"))
    if _reusable(final, key):
        return final
    partial = final.absolute().with_name(f".{final.name}.partial")
    with _locked(partial, progress):
        if not _reusable(final, key):  # another process may just have finished it
            try:
                _prepare_in(partial, config, sources, key, progress, whole)
            except InputError:
                # Nothing half-made is left behind, unless it is worth going on from.
                if not any(partial.glob("segment-*")) and not any(partial.glob("hub-*")):
                    shutil.rmtree(partial)
                raise
            with writing(final):
                (partial / "lock").unlink()
                os.rename(partial, final)
                sync_folder(final.absolute().parent)
    return final


def check_data(config: DataConfig) -> Sources:
    """The sources, or every problem that can be told without reading any text.

    Raises:
        InputError: with all of them.
    """
    problems = check_tokenizer(config)
    sources = Sources()
    try:
        sources = find_sources(config)
    except InputError as error:
        problems = error.problems + problems
    raise_if(problems)
    return sources


def cache_folder(config: DataConfig) -> Path:
    """Where prepared data is kept when no folder is named."""
    if config.cache:
        return Path(config.cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podling" / "prepared"


def _reusable(final: Path, key: str) -> bool:
    from podling.data.shards import Prepared

    if not final.exists():
        return False
    if not is_prepared(final):
        if final.is_dir() and not any(final.iterdir()):
            return False
        raise InputError(Problem(str(final), "exists and is not prepared data", "choose another folder"))
    if Prepared.open(final).manifest["key"] != key:
        what = "holds data prepared from other text or with other settings"
        raise InputError(Problem(str(final), what, "choose another folder, or delete this one"))
    return True


def _given_prepared(config: DataConfig, out: Path | None, whole: bool) -> Path:
    """A prepared folder as it is, unless a setting that differs from the default asks for other data."""
    from podling.data.shards import Prepared

    folder = Path(config.paths[0])
    if out is not None:
        raise InputError(Problem(str(folder), "is prepared already", "use it as it is: podling train --data"))
    manifest = Prepared.open(folder).manifest
    if manifest.get("split_rule") == "none" and not whole:
        what = "holds nothing out: it was prepared to be scored, not to be trained on"
        raise InputError(Problem(str(folder), what, "give the text itself"))
    made = manifest["config"]
    problems = []
    default = DataConfig()
    for name in SETTINGS:
        wanted = getattr(config, name)
        if wanted != getattr(default, name) and wanted != made[name]:
            what = f"was prepared with {name} {made[name]!r}, not {wanted!r}"
            problems.append(Problem(str(folder), what, "leave the setting out, or give the text itself"))
    raise_if(problems)
    return folder


@contextlib.contextmanager
def _locked(partial: Path, progress: Progress | None) -> Iterator[None]:
    """Hold `partial` alone; wait for another process that is preparing the same folder."""
    meter = Meter("waiting for another podling preparing this data", None, None)
    while True:
        with writing(partial):
            partial.mkdir(parents=True, exist_ok=True)
        try:
            file = open(partial / "lock", "a")  # noqa: SIM115 - closed below, together with the lock
        except FileNotFoundError:
            continue  # it was renamed just now
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if meter.progress is None and progress is not None:
                meter = Meter(meter.stage, None, progress)
            time.sleep(0.2)
            continue
        with file:
            if _is_same_file(file, partial / "lock"):
                yield
                return


def _is_same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _prepare_in(
    partial: Path, config: DataConfig, sources: Sources, key: str, progress: Progress | None, whole: bool
) -> None:
    """Do the work in `partial`, starting from what an earlier attempt with the same key has finished."""
    from podling.data.shards import write_manifest

    mark = partial / "key"
    if not mark.exists() or mark.read_text() != key:
        for path in partial.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        atomic_write(mark, key)
    if not (partial / "tokenizer.about").exists() and config.tokenizer not in ("bpe", "char"):
        # What may be missing or broken is found before any text is read.
        _save_tokenizer(partial, known_tokenizer(config.tokenizer))
    local, replaced = spool_hub(partial, config, sources, progress)
    found = scan(local, config, progress)
    found.counts.replaced += replaced
    if whole:
        config = replace(config, holdout=0.0)  # what the manifest is to say
    split = hold_nothing_out(found) if whole else choose_split(found, config.holdout)
    tokenizer = _tokenizer(partial, config, local, found, split, progress)
    meter = Meter("tokenizing", found.total_bytes, progress)
    totals = encode_segments(partial, local, config, split, tokenizer, meter)
    meter.finish()
    for path in [mark, partial / "tokenizer.about", *partial.glob("segment-*.json"), *partial.glob("hub-*")]:
        path.unlink()
    write_manifest(partial, make_manifest(config, sources, key, found, split, tokenizer, totals))


def _tokenizer(
    partial: Path, config: DataConfig, sources: Sources, found: Scan, split: Split, progress: Progress | None
) -> Tokenizer:
    """Make the tokenizer, or take the one that an earlier attempt made."""
    path, about = partial / "tokenizer.json", partial / "tokenizer.about"
    if path.exists() and about.exists():
        made = read_json(about)
        tokenizer = Tokenizer.load(path, made["name"])
        tokenizer.note = made["note"]
        return tokenizer
    tokenizer = build_tokenizer(
        config,
        sources,
        progress,
        total_bytes=found.total_bytes,
        train_document=lambda document: split.train_bytes(document) > 0,
    )
    _save_tokenizer(partial, tokenizer)
    return tokenizer


def _save_tokenizer(partial: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(partial / "tokenizer.json")
    atomic_write(partial / "tokenizer.about", json.dumps({"name": tokenizer.name, "note": tokenizer.note}))
