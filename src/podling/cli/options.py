"""How a configuration comes together: preset, then file or run, then flags; each step wins over the one before."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from podling.cli.parse import peek
from podling.config import Config, DataConfig, flags, from_dict, to_dict
from podling.data.prepare import check_data, is_prepared
from podling.errors import InputError, Problem
from podling.files import read_json
from podling.presets import PRESETS
from podling.run.folder import RunPaths, load_run

JsonFlag = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]
Device = Literal["auto", "cpu", "gpu", "tpu"]
Dtype = Literal["auto", "float32", "bfloat16"]
ConfigFlag = Annotated[str, arg(name="config", metavar="FILE", help_behavior_hint="")]


def base_config(argv: Sequence[str], preset: str = "gpt2-micro") -> tuple[Config, list[Problem]]:
    """The configuration that the flags start from, as `--resume`, `--config` and `--model` decide it.

    An explicit `--model` gives its preset's sizes even where a file has others; the file keeps its say in the rest.

    Args:
        argv: the arguments.
        preset: the one that is meant where nothing names one.

    Returns:
        The configuration, and what kept it from being the one that was asked for.
    """
    name, resume, path = peek(argv, "--model"), peek(argv, "--resume"), peek(argv, "--config")
    try:
        if resume is not None:
            base = open_run(resume)[0]
        elif path is not None:
            base = _read(Path(path), preset)
        else:
            base = PRESETS[name if name in PRESETS else preset].config
    except InputError as error:
        return PRESETS[preset].config, error.problems
    if name in PRESETS:
        base = replace(base, model=PRESETS[name].config.model)
    if resume is not None:
        base = replace(base, run=replace(base.run, out=resume))
    try:
        return _initialised(base, argv), []
    except InputError as error:
        return base, error.problems


def _initialised(base: Config, argv: Sequence[str]) -> Config:
    """With `--init` the model and the tokenizer are those of the run it names, unless flags say otherwise."""
    init = peek(argv, "--init")
    if not init:
        return base
    config, paths = open_run(init)
    if peek(argv, "--model") is None:
        base = replace(base, model=replace(config.model, dropout=base.model.dropout))
    data = peek(argv, "--data")
    # Prepared data has its tokenizer, which is compared with the run's when training starts.
    if data is None or not is_prepared(data):
        base = replace(base, data=replace(base.data, tokenizer=str(paths.tokenizer)))
    return base


def open_run(path: str) -> tuple[Config, RunPaths]:
    """`load_run`, with a word for those who give the folder of a Hugging Face model.

    Raises:
        InputError: there is no run at `path`.
    """
    file = Path(path) / "config.json"
    if file.is_file() and "model_type" in read_json(file):
        what = "is a model of Hugging Face transformers, not a run"
        raise InputError(Problem(path, what, f"make it one: podling import {path} --out RUN"))
    return load_run(Path(path))


def _read(path: Path, preset: str) -> Config:
    """A configuration file over the defaults of the preset it names, or else of `preset`."""
    data = read_json(path)
    model = data.get("model")
    name = model.get("preset") if isinstance(model, dict) else None
    layers: dict[str, Any] = to_dict(PRESETS[name if name in PRESETS else preset].config)
    for section, fields in data.items():
        known = isinstance(fields, dict) and isinstance(layers.get(section), dict)
        layers[section] = layers[section] | fields if known else fields
    return from_dict(layers, str(path))


def settle(config: Config, given: frozenset[str]) -> tuple[Config, list[str], list[Problem]]:
    """Values that follow from others unless they are given, and flags that contradict one another.

    Args:
        config: as parsed.
        given: the flags that were on the command line.

    Returns:
        The settled configuration, notes for the person on what was derived, and problems.
    """
    config = replace(config, data=_follow_prepared(config.data, given))
    problems = contradictions(config, given)
    notes: list[str] = []
    model, train = config.model, config.train
    if "--model.embed" in given and "--model.mlp" not in given:
        model = replace(model, mlp=4 * model.embed)
        notes.append(f"--model.mlp follows --model.embed: {model.mlp}")
    if "--steps" in given:
        train = replace(train, tokens=0)
    config = replace(config, model=model, train=train)
    warmup = config.optimizer.warmup_steps
    steps = train.total_steps
    if {"--steps", "--tokens"} & given and "--optimizer.warmup-steps" not in given and 0 < steps < 5 * warmup:
        shorter = max(1, steps // 10)
        config = replace(config, optimizer=replace(config.optimizer, warmup_steps=shorter))
        notes.append(
            f"warm-up shortened from {warmup} to {shorter} steps, a tenth of the run (--optimizer.warmup-steps)"
        )
    return config, notes, problems


def _follow_prepared(data: DataConfig, given: frozenset[str]) -> DataConfig:
    """Prepared data brings its own settings: a preset has no say in them, a flag on the command line must agree."""
    if len(data.paths) != 1 or not is_prepared(data.paths[0]):
        return data
    made = read_json(Path(data.paths[0]) / "manifest.json").get("config", {})
    names = {flag.field: flag.name for flag in flags() if flag.section == "data"}
    kept: dict[str, Any] = {
        field: value for field, value in made.items() if field in names and names[field] not in given
    }
    return replace(data, **kept)


def data_problems(data: DataConfig, *, everything: bool) -> list[Problem]:
    """What can be told about the data without reading any text.

    Args:
        data: as settled.
        everything: also look for the default text, which only matters to a command that will otherwise run.
    """
    if (len(data.paths) == 1 and is_prepared(data.paths[0])) or not (data.paths or everything):
        return []
    try:
        check_data(data)
    except InputError as error:
        return error.problems
    return []


def contradictions(config: Config, given: frozenset[str]) -> list[Problem]:
    """Flags that cannot both hold, or would do nothing."""
    problems: list[Problem] = []
    for first, second in (
        ("--steps", "--tokens"),
        ("--resume", "--config"),
        ("--resume", "--out"),
        ("--resume", "--init"),
    ):
        if {first, second} <= given:
            problems.append(Problem(second, f"cannot go together with {first}", "give one of them"))
    if "--data" in given and not config.data.paths:
        problems.append(Problem("--data", "no path follows", "give a path, or leave the flag out for the default text"))
    if "--vocab-size" in given and config.data.tokenizer != "bpe":
        what = f"the tokenizer {config.data.tokenizer} has its own size"
        problems.append(Problem("--vocab-size", what, "leave it out, or use --tokenizer bpe"))
    if "--optimizer.decay-fraction" in given and config.optimizer.schedule != "wsd":
        what = f"the {config.optimizer.schedule} schedule has no decay phase"
        problems.append(Problem("--optimizer.decay-fraction", what, "leave it out, or use --optimizer.schedule wsd"))
    return problems
