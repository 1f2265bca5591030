"""From arguments to a dataclass: tyro parses, and what it refuses becomes problems, all of them at once."""

import contextlib
import difflib
import io
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional

from podling.config import Config, DataConfig, flags
from podling.errors import InputError, Problem

Args = TypeVar("Args")

SYNONYMS = {
    "learning-rate": "--lr",
    "block-size": "--context",
    "seq-len": "--context",
    "max-steps": "--steps",
    "n-layer": "--model.layers",
    "n-head": "--model.heads",
    "n-embd": "--model.embed",
    "output-dir": "--out",
}
"""What other programs call our flags."""


@dataclass(frozen=True)
class Parsed(Generic[Args]):
    """What the arguments said, and what was wrong with them."""

    args: Args
    given: frozenset[str]
    """Flags that were on the command line, in their spelling with hyphens."""
    problems: list[Problem]


def parse(
    kind: type[Args],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    default: Args | None = None,
    problems: Sequence[Problem] = (),
) -> Parsed[Args]:
    """Parse `argv` into a `kind`; `--help` prints and leaves.

    tyro stops at the first value it cannot read. That argument is then put aside and the rest parsed again, so one
    call names every problem.

    Args:
        kind: dataclass of the command's arguments.
        argv: the arguments after the command's name.
        prog: the command as typed, for the help text.
        description: what the help text says about it.
        default: values of arguments that are not given.
        problems: those found before, to be reported with the new ones.

    Raises:
        SystemExit: with code 0, after printing the help text.
        InputError: something is wrong that leaves no arguments to go on with, such as a missing positional one.
    """
    if {"-h", "--help"} & set(argv):
        print(wrapped(description, min(100, shutil.get_terminal_size().columns)) + "\n")
    types = known_flags(kind)
    given = frozenset(name for name in map(_flag_name, argv) if name in types)
    problems = list(problems)
    left = list(argv)
    while True:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                args, unknown = tyro.cli(
                    kind,
                    prog=prog,
                    description="",
                    args=left,
                    default=tyro.MISSING_NONPROP if default is None else default,
                    return_unknown_args=True,
                )
        except SystemExit as stop:
            if not stop.code:
                raise
            message = _message(errors.getvalue())
            flag = next((name for name in re.findall(r"--[\w.-]*\w", message) if name in types), None)
            kept, values = _without(left, flag)
            if flag is None or len(kept) == len(left):
                raise InputError([*problems, *_unreadable(message, prog)]) from None
            problems.append(bad_value(flag, types[flag], values, message))
            left = kept
            continue
        return Parsed(args, given, problems + _unknown(unknown, types, prog))


def wrapped(text: str, width: int) -> str:
    """`text` with its long lines wrapped; what follows a wide gap in a line hangs under it."""
    lines: list[str] = []
    for line in text.splitlines():
        gap = re.match(r" *(?:\S+ {2,})?", line)
        hang = " " * (gap.end() if gap else 0)
        lines.append(textwrap.fill(line, width, subsequent_indent=hang, replace_whitespace=False) if line else "")
    return "\n".join(lines)


def known_flags(kind: Any) -> dict[str, Any]:
    """Every flag of a command's dataclass with the type it takes; positional arguments have none."""
    positional = Positional[int].__metadata__[0]  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        extras = getattr(hint, "__metadata__", ())
        plain = hint.__origin__ if extras else hint
        if plain is Config or plain is DataConfig:
            sections = {"data"} if plain is DataConfig else {flag.section for flag in flags()}
            found |= {flag.name: flag.type for flag in flags() if flag.section in sections}
        elif is_dataclass(plain):
            found |= known_flags(plain)
        elif positional not in extras:
            short = [extra.name for extra in extras if getattr(extra, "name", None)]
            found[f"--{short[0] if short else name.replace('_', '-')}"] = plain
    for name in [name for name, type_ in found.items() if type_ is bool]:
        section, _, field = name.removeprefix("--").rpartition(".")
        found[f"--{section}.no-{field}" if section else f"--no-{field}"] = bool
    return found


def peek(argv: Sequence[str], flag: str) -> str | None:
    """The value of one flag before parsing: some flags decide the defaults of the others."""
    found = None
    for index, word in enumerate(argv):
        if _flag_name(word) == flag:
            found = word.partition("=")[2] if "=" in word else next(iter(argv[index + 1 : index + 2]), None)
    return found


def bad_value(flag: str, type_: Any, values: list[str], message: str) -> Problem:
    """What is wrong with the value of one flag, in the words of its type."""
    shown = " ".join(values)
    if get_origin(type_) is Literal and values:
        choices = list(get_args(type_))
        near = difflib.get_close_matches(shown, choices, n=1)
        return Problem(
            flag, f"{shown!r} is not one of {', '.join(choices)}", f"did you mean {near[0]}?" if near else ""
        )
    kind = {int: "a whole number", float: "a number"}.get(type_, "a value")
    if not values or message.startswith("Missing"):
        return Problem(flag, f"needs {kind}")
    return Problem(flag, f"{shown!r} is not {kind}" if type_ in (int, float) else message)


def _unreadable(message: str, prog: str) -> list[Problem]:
    """Problems of no single flag: a positional argument that is missing, or whatever else tyro says."""
    hint = f"{prog} --help shows what it takes"
    if message.startswith("Missing from"):
        missing = re.findall(r"\b[A-Z]{2,}\b", message) or ["an argument"]
        return [Problem(name, "is missing", hint) for name in missing]
    return [Problem(prog, message, hint)]


def _unknown(words: list[str], types: dict[str, Any], prog: str) -> list[Problem]:
    problems: list[Problem] = []
    in_flag = False
    for word in words:
        name = _flag_name(word)
        if name is not None:
            near = nearest(name, types)
            problems.append(
                Problem(word.partition("=")[0], "there is no such flag", near or f"{prog} --help lists them")
            )
        elif not in_flag:
            hint = f"did you mean --data {word}?" if "--data" in types else f"{prog} --help shows what it takes"
            problems.append(Problem(word, "this argument belongs to no flag", hint))
        in_flag = name is not None and "=" not in word
    return problems


def nearest(name: str, known: Any) -> str:
    """A hint with the nearest flag; `--layers` finds `--model.layers`. Empty when nothing is near."""
    last_part = {flag.rpartition(".")[2].removeprefix("--"): flag for flag in known}
    bare = name.removeprefix("--").rpartition(".")[2]
    if (negated := re.sub(r"^--no-(.+)\.", r"--\1.no-", name)) in known:
        return f"did you mean {negated}?"
    if SYNONYMS.get(bare) in known:
        return f"did you mean {SYNONYMS[bare]}?"
    near = [last_part[part] for part in difflib.get_close_matches(bare, list(last_part), n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _flag_name(word: str) -> str | None:
    """`--batch_tokens=4` → `--batch-tokens`; None for a value."""
    return word.partition("=")[0].replace("_", "-") if re.match(r"--\w", word) else None


def _without(argv: list[str], flag: str | None) -> tuple[list[str], list[str]]:
    """`argv` without one flag and its values, and those values."""
    kept: list[str] = []
    values: list[str] = []
    dropping = False
    for word in argv:
        if (name := _flag_name(word)) is not None:
            dropping = name == flag
            if dropping and "=" in word:
                values.append(word.partition("=")[2])
                dropping = False
                continue
            if dropping:
                continue
        (values if dropping else kept).append(word)
    return kept, values


def _message(box: str) -> str:
    """The sentence inside the box that tyro draws."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ").strip() for line in plain.splitlines() if line.startswith("│")]
    until = next((index for index, line in enumerate(lines) if line.startswith("───")), len(lines))
    return re.sub(r"\s+", " ", " ".join(lines[:until])).strip() or plain.strip()
