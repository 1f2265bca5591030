"""The configuration gate: everything that can be said about a configuration before data or devices are touched.

`validate` returns all problems, each with what to do about it. No JAX, no NumPy, and of files only
whether they are there.
"""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from podling.config import Config, flags
from podling.errors import InputError, Problem
from podling.files import file_above, parse_bytes
from podling.kernels import attention_problem
from podling.parallel.axes import read_mesh
from podling.presets import PRESETS, unknown_preset

Test = tuple[Callable[[Any], bool], str]

POSITIVE: Test = (lambda value: value >= 1, "must be at least 1")
COUNT: Test = (lambda value: value >= 0, "must not be negative")
CHUNK: Test = (lambda value: value >= -1, "must be a number of positions, 0 for one piece or -1 to have it chosen")
ABOVE_ZERO: Test = (lambda value: 0 < value < math.inf, "must be a number above 0")
AT_LEAST_ZERO: Test = (lambda value: 0 <= value < math.inf, "must be a number, 0 or more")
SHARE: Test = (lambda value: 0 <= value <= 1, "must be from 0 to 1")
BELOW_ONE: Test = (lambda value: 0 <= value < 1, "must be from 0 to less than 1")
INSIDE: Test = (lambda value: 0 < value < 1, "must be between 0 and 1, both excluded")
NOT_EMPTY: Test = (lambda value: value.strip() != "", "must not be empty")
SEED: Test = (lambda value: 0 <= value < 2**32, "must be from 0 to 4294967295")

RULES: dict[tuple[str, str], Test] = {
    ("model", "layers"): POSITIVE,
    ("model", "heads"): POSITIVE,
    ("model", "embed"): POSITIVE,
    ("model", "mlp"): POSITIVE,
    ("model", "context"): POSITIVE,
    ("model", "vocab_size"): COUNT,
    ("model", "dropout"): BELOW_ONE,
    ("data", "paths"): (lambda value: all(path.strip() for path in value), "has an empty path"),
    ("data", "tokenizer"): NOT_EMPTY,
    ("data", "vocab_size"): POSITIVE,
    ("data", "text_field"): NOT_EMPTY,
    ("data", "holdout"): INSIDE,
    ("optimizer", "lr"): ABOVE_ZERO,
    ("optimizer", "warmup_steps"): COUNT,
    ("optimizer", "lr_floor"): SHARE,
    ("optimizer", "decay_fraction"): SHARE,
    ("optimizer", "beta1"): BELOW_ONE,
    ("optimizer", "beta2"): BELOW_ONE,
    ("optimizer", "eps"): ABOVE_ZERO,
    ("optimizer", "weight_decay"): AT_LEAST_ZERO,
    ("optimizer", "clip_norm"): AT_LEAST_ZERO,
    ("train", "steps"): POSITIVE,
    ("train", "tokens"): COUNT,
    ("train", "batch_tokens"): POSITIVE,
    ("train", "micro_batch"): COUNT,
    ("train", "seed"): SEED,
    ("train", "loss_chunk"): CHUNK,
    ("train", "eval_every"): COUNT,
    ("train", "eval_tokens"): COUNT,
    ("train", "samples"): COUNT,
    ("run", "out"): NOT_EMPTY,
    ("run", "checkpoint_every"): COUNT,
    ("run", "keep"): POSITIVE,
    ("run", "log_every"): POSITIVE,
}


def validate(
    config: Config, sections: tuple[str, ...] = ("model", "data", "optimizer", "train", "run")
) -> list[Problem]:
    """Every problem of a configuration; empty when it can be used.

    Args:
        config: the resolved configuration.
        sections: what the command uses; `prepare` has no use for a learning rate.
    """
    problems = _fields(config, sections)
    bad = {problem.where for problem in problems}
    checks = {
        "model": [_preset, _heads],
        "data": [_limit],
        "optimizer": [],
        "train": [_batch, _attention, _warmup],
        "run": [_mesh, _out, _init, _extras],
    }
    for section in sections:
        for check in checks[section]:
            # A field that is wrong by itself says nothing in relation to others.
            problems += [found for found in check(config, bad) if found.where not in bad]
    return problems


def _fields(config: Config, sections: tuple[str, ...]) -> list[Problem]:
    problems: list[Problem] = []
    for flag in flags():
        if flag.section not in sections:
            continue
        value = getattr(getattr(config, flag.section), flag.field)
        choices = get_args(flag.type) if get_origin(flag.type) is Literal else ()
        holds, message = RULES.get((flag.section, flag.field), (None, ""))
        if choices and value not in choices:
            problems.append(Problem(flag.name, f"{value!r} is not one of {', '.join(choices)}"))
        elif holds is not None and not holds(value):
            problems.append(Problem(flag.name, f"{value!r} {message}"))
    return problems


def _preset(config: Config, bad: set[str]) -> list[Problem]:
    return [] if config.model.preset in PRESETS else [unknown_preset(config.model.preset)]


def _heads(config: Config, bad: set[str]) -> list[Problem]:
    heads, embed = config.model.heads, config.model.embed
    if "--model.embed" in bad or "--model.heads" in bad or embed % heads == 0:
        return []
    near = sorted(sorted(_divisors(embed), key=lambda number: abs(number - heads))[:5])
    return [
        Problem(
            "--model.heads",
            f"{heads} heads do not divide an embed of {embed}",
            f"heads that do: {_listed(near)}; or --model.embed {_listed(_multiples_near(embed, heads))}",
        )
    ]


def _batch(config: Config, bad: set[str]) -> list[Problem]:
    train, context = config.train, config.model.context
    if {"--context", "--batch-tokens"} & bad:
        return []
    problems: list[Problem] = []
    rows, rest = divmod(train.batch_tokens, context)
    if rest:
        near = _listed(_multiples_near(train.batch_tokens, context))
        what = f"{train.batch_tokens} is not a multiple of the context of {context}"
        problems.append(Problem("--batch-tokens", what, f"nearest: {near}"))
    elif train.micro_batch and "--train.micro-batch" not in bad and rows % train.micro_batch:
        what = f"{train.micro_batch} does not divide the {rows} sequences of a batch ({train.batch_tokens} tokens)"
        near = sorted(sorted(_divisors(rows), key=lambda number: abs(number - train.micro_batch))[:5])
        problems.append(Problem("--train.micro-batch", what, f"sizes that do: {_listed(near)}; 0 chooses one"))
    if train.loss_chunk > 0 and "--train.loss-chunk" not in bad and context % train.loss_chunk:
        near = sorted(sorted(_divisors(context), key=lambda number: abs(number - train.loss_chunk))[:5])
        what = f"{train.loss_chunk} does not divide the context of {context}"
        problems.append(Problem("--train.loss-chunk", what, f"sizes that do: {_listed(near)}; 0 turns chunks off"))
    return problems


def _attention(config: Config, bad: set[str]) -> list[Problem]:
    train, model = config.train, config.model
    if {"--context", "--model.embed", "--model.heads", "--model.dropout", "--train.attention", "--dtype"} & bad:
        return []
    dtype = "float32" if train.dtype == "float32" else "bfloat16"
    what, takes = attention_problem(train.attention, model.context, model.head_dim, model.dropout, dtype)
    return [Problem("--train.attention", what, f"it takes {takes}; auto or reference takes any")] if what else []


def _warmup(config: Config, bad: set[str]) -> list[Problem]:
    train, warmup = config.train, config.optimizer.warmup_steps
    if {"--steps", "--tokens", "--batch-tokens", "--optimizer.warmup-steps"} & bad:
        return []
    steps = train.total_steps
    if warmup <= steps:
        return []
    what = f"a warm-up of {warmup} steps is longer than the run of {steps}"
    return [Problem("--optimizer.warmup-steps", what, f"at most {steps}; a tenth of the run is {max(1, steps // 10)}")]


def _mesh(config: Config, bad: set[str]) -> list[Problem]:
    """The text alone: whether the devices are there is for the device gate."""
    return [] if config.run.mesh == "auto" else read_mesh(config.run.mesh)[1]


def _limit(config: Config, bad: set[str]) -> list[Problem]:
    if config.data.limit:
        try:
            parse_bytes(config.data.limit, "--limit")
        except InputError as error:
            return error.problems
    return []


def _out(config: Config, bad: set[str]) -> list[Problem]:
    return out_problems(config.run.out)


def out_problems(out: str, where: str = "--out") -> list[Problem]:
    """Whether a folder can be made here: no parent may be a file."""
    path = Path(out)
    blocker = path if path.exists() and not path.is_dir() else file_above(path)
    if blocker is None:
        return []
    what = f"{out} is a file" if blocker == path else f"{out} lies below the file {blocker}"
    return [Problem(where, what, "give a folder, or a path that does not exist yet")]


def svg_problems(file: str) -> list[Problem]:
    """Whether a picture can be written here; only what is named as one is written over."""
    path = Path(file)
    if path.suffix.lower() != ".svg":
        what = f"{file} does not end in .svg" if file else "is empty"
        return [Problem("--svg", what, "give the picture's name, for example picture.svg")]
    if path.is_dir():
        return [Problem("--svg", f"{file} is a folder", "give a file's name")]
    return out_problems(str(path.parent), "--svg")


def _init(config: Config, bad: set[str]) -> list[Problem]:
    if not config.run.init or Path(config.run.init).is_dir():
        return []
    return [Problem("--init", f"{config.run.init} is not a folder", "give a run or an imported model")]


def _extras(config: Config, bad: set[str]) -> list[Problem]:
    if not config.run.wandb or importlib.util.find_spec("wandb"):
        return []
    return [Problem("--run.wandb", "Weights & Biases is not installed", "pip install 'podling[wandb]'")]


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _multiples_near(number: int, step: int) -> list[int]:
    """The multiples of `step` on both sides of `number`, leaving out 0."""
    below = number // step * step
    return [value for value in (below, below + step) if value]


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
