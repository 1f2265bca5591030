"""The `podling train` command that is a configuration."""

import shlex
from typing import Any

from podling.config import Config, DataConfig, flags
from podling.data.sources import is_prepared
from podling.presets import PRESETS

LAPTOP = ("gpt2-nano", "gpt2-micro")
"""Presets that are meant for the text that is there without --data."""


def train_command(config: Config) -> str:
    """What to type: `--model`, and every flag whose value is not the preset's.

    Args:
        config: resolved; the vocabulary's size is the tokenizer's, and typed only where the text is to tell it.
    """
    preset = PRESETS[config.model.preset].config
    skipped = ["--model"] if _only_text_tells(config.data) else ["--model", "--model.vocab-size"]
    words = ["podling", "train", "--model", config.model.preset]
    for flag in flags():
        value = getattr(getattr(config, flag.section), flag.field)
        if flag.name in skipped or value == _default(preset, flag.section, flag.field):
            continue
        words += _typed(flag.name, value)
    if not config.data.paths and config.model.preset not in LAPTOP:
        words += ["--data", "PATH"]
    return shlex.join(words)


def _only_text_tells(data: DataConfig) -> bool:
    """Whether the vocabulary's size is known no sooner than the text is read."""
    return data.tokenizer == "char" and not (len(data.paths) == 1 and is_prepared(data.paths[0]))


def _default(preset: Config, section: str, field: str) -> Any:
    return getattr(getattr(preset, section), field)


def _typed(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        prefix, _, last = name[2:].rpartition(".")
        return [name] if value else [f"--{prefix + '.' if prefix else ''}no-{last}"]
    if isinstance(value, tuple):
        return [name, *map(str, value)]
    return [name, str(value)]
