"""Finding text: files, folders, globs and hub datasets become a list of sources."""

import difflib
import glob
import importlib.util
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podling.config import DataConfig
from podling.data.opening import Compression
from podling.errors import InputError, Problem, raise_if
from podling.files import parse_bytes

PROSE = ".txt .text .md .markdown .rst .org .tex .adoc .srt .html .htm .xml .csv .tsv .yaml .yml .toml .ini .cfg .json"
CODE = (
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .java .js .mjs .jsx .ts .tsx .go .rs .rb .php .swift .kt "
    ".scala .hs .ml .mli .lua .r .jl .sh .bash .zsh .ps1 .sql .css .scss .pl .pm .ex .exs .erl .clj .lisp .el .scm "
    ".zig .nim .dart .m .mm .f .f90 .asm .s .v .sv .vhd .cmake .proto .graphql .tf .vim .bat .tcl .cs .fs .vb .ada"
)
TEXT_SUFFIXES = frozenset((PROSE + " " + CODE).split())
JSONL_SUFFIXES = frozenset((".jsonl", ".ndjson"))
KNOWN = "known: .txt, .md, source code, .jsonl, .parquet, each also .gz or .zst; rename plain text to .txt"
_STDLIB_WITHOUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"} | {
    "encodings",  # code page tables, and
    "pydoc_data",  # the manual as one string: made by programs, a fifth of the text, and no example of Python
}


@dataclass(frozen=True)
class Source:
    """One file, or one dataset of a hub; `name` is how messages call it, `size_bytes` its size on disk."""

    name: str
    kind: Literal["text", "jsonl", "parquet", "hub"]
    compression: Compression = ""
    path: Path | None = None
    size_bytes: int = 0


class Sources(list[Source]):
    """The sources in reading order, and what was passed over on the way, counted by reason."""

    def __init__(self, sources: Iterable[Source] = (), skipped: Counter[str] | None = None):
        super().__init__(sources)
        self.skipped = skipped if skipped is not None else Counter()


def find_sources(config: DataConfig) -> Sources:
    """List everything to read, without reading it.

    Folders are searched through (hidden entries are not), with what they hold in sorted order; files there that are
    empty or of an unknown suffix are counted in `.skipped`. A file given by name must be readable.

    Raises:
        InputError: with every path that is missing, empty, unknown or needs an extra that is not installed.
    """
    problems: list[Problem] = []
    found = Sources()
    if config.limit:
        try:
            parse_bytes(config.limit, "--limit")
        except InputError as error:
            problems += error.problems
    for path in config.paths:
        if path.startswith("hf:"):
            _add_hub(path, found, problems)
        elif os.path.isdir(path):
            _add_folder(path, found, problems)
        elif os.path.exists(path):
            _add_file(path, found, problems)
        elif glob.has_magic(path):
            _add_glob(path, found, problems)
        else:
            problems.append(_missing(path))
    if not config.paths:
        found.extend(_standard_library())
    raise_if(problems)
    # A path named twice (a folder and a file inside it) is read once: doubled documents would leak into the held-out.
    unique = {source.path.resolve() if source.path else source.name: source for source in reversed(found)}
    kept = {id(source) for source in unique.values()}
    found.skipped["named twice"] += len(found) - len(kept)
    found[:] = [source for source in found if id(source) in kept]
    found.skipped = +found.skipped
    if not found:
        raise InputError(Problem("--data", "nothing to read"))
    return found


def hub_parts(name: str) -> tuple[str, str | None, str]:
    """hf:owner/name[:config][:split] → (owner/name, config, split).

    With one part after the name, the usual splits (train, validation, test) are taken as the split.
    """
    path, _, rest = name.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    if not split and config in ("train", "validation", "test"):
        config, split = "", config
    return path, config or None, split or "train"


def is_prepared(path: Path | str) -> bool:
    """Whether `path` is a folder that `podling prepare` finished."""
    return os.path.isfile(os.path.join(path, "manifest.json"))


def _standard_library() -> list[Source]:
    """The standard library's own source, the default text: every .py file that a person wrote, without tests."""
    root = sysconfig.get_path("stdlib")
    return [_source(path) for path in _walk(root, _STDLIB_WITHOUT) if path.endswith(".py") and os.path.getsize(path)]


def _walk(root: str, without: set[str] = frozenset()) -> Iterator[str]:  # pyright: ignore[reportArgumentType]
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above it, or one that was read already
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        yield from (os.path.join(folder, name) for name in sorted(files) if not name.startswith("."))


def _kind(path: str) -> tuple[str, str]:
    """(kind, compression) by suffix; kind is empty when the suffix is unknown."""
    stem, suffix = os.path.splitext(path.lower())
    compression = suffix[1:] if suffix in (".gz", ".zst") else ""
    if compression:
        suffix = os.path.splitext(stem)[1]
    if suffix in TEXT_SUFFIXES:
        return "text", compression
    if suffix in JSONL_SUFFIXES:
        return "jsonl", compression
    return ("parquet" if suffix == ".parquet" and not compression else ""), compression


def _source(path: str) -> Source:
    kind, compression = _kind(path)
    return Source(path, kind or "text", compression, Path(path), os.path.getsize(path))  # pyright: ignore[reportArgumentType]


def _add_file(path: str, found: Sources, problems: list[Problem]) -> None:
    kind, compression = _kind(path)
    suffix = os.path.splitext(path)[1]
    if not os.path.isfile(path):
        problems.append(Problem(path, "is not a regular file"))
    elif not kind and suffix:
        problems.append(Problem(path, f"is of an unknown kind ({suffix})", KNOWN))
    elif os.path.getsize(path) == 0:
        problems.append(Problem(path, "is empty", "leave it out, or check that it was written"))
    elif (problem := _extra_problem(path, kind, compression)) is not None:
        problems.append(problem)
    else:
        found.append(_source(path))


def _add_listed(paths: Iterable[str], found: Sources, problems: list[Problem]) -> tuple[int, Counter[str]]:
    """Add what can be read; count the rest by reason."""
    added, skipped = 0, Counter()
    for path in paths:
        kind, compression = _kind(path)
        if not os.path.isfile(path):
            skipped["not a regular file"] += 1
        elif not kind:
            skipped[os.path.splitext(path)[1].lower() or "no suffix"] += 1
        elif os.path.getsize(path) == 0:
            skipped["empty"] += 1
        elif (problem := _extra_problem(path, kind, compression)) is not None:
            problems.append(problem)
            return 1, skipped
        else:
            found.append(_source(path))
            added += 1
    return added, skipped


def _add_folder(path: str, found: Sources, problems: list[Problem]) -> None:
    if is_prepared(path):
        problems.append(Problem(path, "is prepared data, which cannot be mixed with text", "give it alone"))
        return
    added, skipped = _add_listed(_walk(path), found, problems)
    if not added:
        problems.append(Problem(path, f"holds nothing readable ({_counted(skipped)})", KNOWN))
    found.skipped += skipped


def _add_glob(path: str, found: Sources, problems: list[Problem]) -> None:
    matches = sorted(match for match in glob.iglob(path, recursive=True) if not os.path.isdir(match))
    if not matches:
        problems.append(Problem(path, "matches no file"))
        return
    added, skipped = _add_listed(matches, found, problems)
    if not added:
        problems.append(Problem(path, f"matches nothing readable ({_counted(skipped)})", KNOWN))
    found.skipped += skipped


def _add_hub(path: str, found: Sources, problems: list[Problem]) -> None:
    if not hub_parts(path)[0]:
        problems.append(Problem(path, "names no dataset", "write hf:owner/name[:config][:split]"))
    elif not installed("datasets"):
        problems.append(Problem(path, "needs the hub extra", "pip install 'podling[hub]'"))
    else:
        found.append(Source(path, "hub"))


def _extra_problem(path: str, kind: str, compression: str) -> Problem | None:
    if (kind == "parquet" and not installed("pyarrow")) or (compression == "zst" and not installed("zstandard")):
        return Problem(path, "needs the data extra", "pip install 'podling[data]'")
    return None


def _missing(path: str) -> Problem:
    """A path that is not there, with the nearest name where it should be."""
    parent = Path(path).parent
    while not parent.exists() and parent != parent.parent:
        parent, path = parent.parent, str(parent)
    if not parent.is_dir():
        return Problem(path, f"does not exist: {parent} is a file")
    near = difflib.get_close_matches(Path(path).name, os.listdir(parent), n=1, cutoff=0.5)
    return Problem(
        path, "does not exist", f"did you mean {parent / near[0]}?" if near else f"{parent} has no such name"
    )


def _counted(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in skipped.most_common(6)) or "no files"


def installed(module: str) -> bool:
    """Whether an extra's module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
