"""The list of what one checkpoint must contain: every file's size and SHA-256, the arrays, and the run's facts."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax

from podling.errors import InputError, Problem
from podling.files import sync_folder

NAME = "manifest.json"
VERSION = 1


class Damaged(Exception):
    """A checkpoint's bytes are not the ones that were written. The message says which file and how."""


def describe(step: int, state: Any, meta: dict[str, Any], metric: float | None) -> dict[str, Any]:
    """The manifest of a state before its files exist; `meta` must be JSON-ready."""
    leaves = {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in named_leaves(state)}
    return {"version": VERSION, "step": step, "metric": metric, "meta": meta, "leaves": leaves}


def seal(folder: Path, record: dict[str, Any]) -> None:
    """Hash and sync every file below `folder` and write the manifest, itself carrying its own hash."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path, sync=True)}
    body = record | {"files": files}
    with open(folder / NAME, "wb") as out:
        out.write(_encode(body))
        out.flush()
        os.fsync(out.fileno())
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync_folder(path)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a step, its own bytes checked but not the files it lists.

    Raises:
        Damaged: it is missing, or not byte for byte what was written.
    """
    try:
        data = (folder / NAME).read_bytes()
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read ({error.strerror})") from error
    try:
        body = json.loads(data)["content"]
        same = _encode(body) == data
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{NAME} is not what was written") from error
    if not same:
        raise Damaged(f"{NAME} is not what was written")
    if body.get("version") != VERSION:
        raise Damaged(f"{NAME} has version {body.get('version')!r}, this podling reads {VERSION}")
    return body


def verify(folder: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """The manifest of a step after every file it lists has been read and hashed.

    Args:
        folder: of the step.
        share: (i, n) checks the i-th of n shares of about equal bytes; together they are all files.

    Raises:
        Damaged: naming the first file that is missing, of another size, or of other contents.
    """
    body = read(folder)
    by_size = sorted(body["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    for name, expected in by_size[share[0] :: share[1]]:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size} bytes instead of {expected['bytes']}")
            if _sha256(path) != expected["sha256"]:
                raise Damaged(f"the contents of {name} have changed since it was written")
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
    return body


def check_leaves(path: Path, body: dict[str, Any], like: Any) -> None:
    """Compare the arrays of a checkpoint with the ones asked for.

    Raises:
        InputError: naming every array that is missing or has another shape or dtype.
    """
    problems = []
    for name, leaf in named_leaves(like):
        wanted = [str(leaf.dtype), list(leaf.shape)]
        saved = body["leaves"].get(name)
        if saved is None:
            problems.append(Problem(f"{path}: {name}", "is not in this checkpoint"))
        elif saved != wanted:
            what = f"is {saved[0]}{saved[1]} in the checkpoint, {wanted[0]}{wanted[1]} in this configuration"
            problems.append(Problem(f"{path}: {name}", what))
    if problems:
        raise InputError(problems)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with slash paths: `params/blocks/qkv_kernel`."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def hash_leaves(tree: Any) -> str:
    """SHA-256 over the name, dtype, shape and bytes of every leaf."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree):
        value = jax.device_get(leaf)
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _encode(body: dict[str, Any]) -> bytes:
    """One form only, so that any other bytes are damage."""
    content = json.dumps(body, sort_keys=True)
    seal_hash = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({"content": body, "sha256": seal_hash}, sort_keys=True, indent=1).encode()


def _sha256(path: Path, *, sync: bool = False) -> str:
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
