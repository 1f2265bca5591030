"""Files written whole or not at all, and read with errors that name the place."""

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podling.errors import InputError, Problem, RunError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def atomic_write(path: Path | str, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one and nothing between.

    A temporary file in the same folder is written, synced and renamed over `path`; the folder is synced after.

    Raises:
        RunError: the disk is full, or a file-size limit or quota was reached.
        InputError: the path cannot be written (it lies below a file, is a folder, ...).
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            share_like_others(name)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        sync_folder(path.parent)


def share_like_others(path: Path | str) -> None:
    """Make a file that a library made private as readable as any other file of this user."""
    os.chmod(path, 0o666 & ~_umask())


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into an error that says what to do.

    Raises:
        RunError: no space, quota or file-size limit reached.
        InputError: any other refusal.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(Problem(str(path), "no space left to write it", "free some space, then repeat")) from error
        if error.errno == errno.EFBIG:
            what = "the file-size limit of this process was reached"
            raise RunError(Problem(str(path), what, "raise it (ulimit -f unlimited), then repeat")) from error
        blocker = file_above(Path(path))
        if blocker is not None:
            what = f"cannot be made: {blocker} is a file"
            raise InputError(Problem(str(path), what, "choose a path below a folder")) from error
        raise InputError(Problem(str(path), f"cannot be written: {error.strerror or error}")) from error


def file_above(path: Path) -> Path | None:
    """The nearest parent of `path` that exists and is not a folder, if any."""
    for parent in path.absolute().parents:
        if parent.is_dir():
            return None
        if parent.exists():
            return parent
    return None


def read_json(path: Path | str) -> dict[str, Any]:
    """Parse a file holding one JSON object.

    Raises:
        InputError: missing, unreadable, not UTF-8, not JSON (with the line), or not an object.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise InputError(Problem(str(path), f"cannot be read: {error.strerror or error}")) from error
    except UnicodeDecodeError as error:
        raise InputError(Problem(str(path), f"is not JSON: invalid UTF-8 at byte {error.start}")) from error
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}"
        raise InputError(Problem(where, f"is not JSON: {error.msg} (column {error.colno})")) from error
    if not isinstance(value, dict):
        raise InputError(Problem(str(path), f"holds a JSON {type(value).__name__}, not an object"))
    return value


def parse_bytes(text: str, where: str) -> int:
    """Bytes meant by '10GB', '512 MiB' or '1000'; decimal unless the unit has an i.

    Raises:
        InputError: not a size, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match and match[2].upper() in UNITS and (size := int(float(match[1]) * UNITS[match[2].upper()])) > 0:
        return size
    raise InputError(Problem(where, f"{text!r} is not a size above zero", "write it like 500MB, 10GB or 2GiB"))


def counted(number: int, noun: str) -> str:
    """'1 document', '2,400 documents'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def show_bytes(count: float) -> str:
    """'12.6 MB' for 12_600_000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def show_binary(count: float) -> str:
    """'12.0 MiB' for 12 x 2**20, '15.75 GiB': memory is counted in powers of two."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{count:.0f} bytes"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
