"""The `podling train` command that is a configuration."""

import shlex
from typing import Any

from podling.config import Config, flags
from podling.presets import PRESETS


def train_command(config: Config) -> str:
    """What to type: `--model`, and every flag whose value is not the preset's.

    Args:
        config: resolved; the vocabulary's size is the tokenizer's, and not typed.
    """
    preset = PRESETS[config.model.preset].config
    words = ["podling", "train", "--model", config.model.preset]
    for flag in flags():
        value = getattr(getattr(config, flag.section), flag.field)
        if flag.name in ("--model", "--model.vocab-size") or value == _default(preset, flag.section, flag.field):
            continue
        words += _typed(flag.name, value)
    if not config.data.paths and config.data.tokenizer == "gpt2":
        words += ["--data", "PATH"]
    return shlex.join(words)


def _default(preset: Config, section: str, field: str) -> Any:
    return getattr(getattr(preset, section), field)


def _typed(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        prefix, _, last = name[2:].rpartition(".")
        return [name] if value else [f"--{prefix + '.' if prefix else ''}no-{last}"]
    if isinstance(value, tuple):
        return [name, *map(str, value)]
    return [name, str(value)]
