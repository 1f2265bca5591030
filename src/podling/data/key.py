"""The key of prepared data: equal keys mean that the same text would be prepared in the same way."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from podling.config import DataConfig
from podling.data.events import Meter, Progress
from podling.data.sources import Source, Sources, hub_parts
from podling.errors import InputError, Problem
from podling.files import parse_bytes

KEY_VERSION = 1
"""Part of every key: raise it when the same text would give other tokens or another split."""


def data_key(config: DataConfig, sources: Sources, progress: Progress | None, whole: bool = False) -> str:
    """Hash of all that decides the result: the content of every file and every setting.

    `whole` is for data that holds nothing out, which is no value of `config.holdout`.

    Raises:
        InputError: a file cannot be read, or a hub dataset cannot be found.
    """
    digests = _hash_sources(sources, progress)
    settings: dict[str, Any] = {
        "version": KEY_VERSION,
        "tokenizer": config.tokenizer,
        "vocab_size": config.vocab_size if config.tokenizer == "bpe" else None,
        "text_field": config.text_field,
        "errors": config.errors,
        "split_on_eot": config.split_on_eot,
        "limit_bytes": parse_bytes(config.limit, "--limit") if config.limit else None,
        "holdout": None if whole else config.holdout,
        "sources": [[s.name, s.kind, s.size_bytes, digest] for s, digest in zip(sources, digests, strict=True)],
        "revisions": [_hub_revision(source) for source in sources if source.kind == "hub"],
        "vocabulary": [_file_digest(path) for path in _vocabulary_files(config.tokenizer)],
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _vocabulary_files(tokenizer: str) -> list[Path]:
    path = Path(tokenizer)
    if tokenizer in ("bpe", "char", "bytes", "gpt2") or not path.exists():
        return []
    names = ("tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe")
    return [path / name for name in names if (path / name).is_file()] if path.is_dir() else [path]


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hub_revision(source: Source) -> str:
    """What the dataset holds now: the hash of its local files, or the hub's revision."""
    path = hub_parts(source.name)[0]
    if os.path.isdir(path):
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        return hashlib.sha256("".join(f"{file}{_file_digest(file)}" for file in files).encode()).hexdigest()
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(path, timeout=20).sha or ""
    except Exception as error:  # offline, missing, private: each library version has its own exceptions for it
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        fix = "check the name and the network; or give local files, or a folder that podling prepare wrote"
        raise InputError(Problem(source.name, f"cannot be found: {reason}", fix)) from error


def _hash_sources(sources: Sources, progress: Progress | None) -> list[str]:
    """blake2b of each file as it lies on disk; hub datasets have none ("").

    Raises:
        InputError: a file cannot be read.
    """
    meter = Meter("checking files", sum(source.size_bytes for source in sources), progress)
    with ThreadPoolExecutor(2) as pool:  # hashlib releases the GIL
        digests = []
        for source, digest in zip(sources, pool.map(_hash_file, sources), strict=True):
            meter.add(source.size_bytes)
            digests.append(digest)
    meter.finish()
    return digests


def _hash_file(source: Source) -> str:
    if source.path is None:
        return ""
    try:
        with open(source.path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
    except OSError as error:
        raise InputError(Problem(source.name, f"cannot be read: {error.strerror}")) from error
