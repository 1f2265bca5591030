"""Named sizes: each sets the model and training defaults that suit it, and any flag changes one of them.

The laptop sizes are for a few minutes on a CPU. The others are GPT-2's four (Radford et al. 2019, table 2) with the
learning rates of GPT-3's models of the same size (Brown et al. 2020, table 2.1), batches of half a million tokens
and ten billion tokens of text.
"""

from dataclasses import dataclass, replace
from typing import Any

from podling.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, did_you_mean
from podling.errors import InputError, Problem


@dataclass(frozen=True)
class Preset:
    """A configuration with what to type for it, what to run it on and what to expect."""

    command: str
    about: str
    """Hardware and expectation, with the source of any number."""
    config: Config


def _laptop(
    name: str, command: str, about: str, *, layers: int, embed: int, context: int, vocab: int, **train: Any
) -> Preset:
    lr, warmup = train.pop("lr"), train.pop("warmup")
    model = ModelConfig(preset=name, layers=layers, heads=layers, embed=embed, mlp=4 * embed, context=context)
    return Preset(
        command,
        about,
        Config(
            model=model,
            data=DataConfig(vocab_size=vocab),
            optimizer=OptimizerConfig(lr=lr, warmup_steps=warmup),
            train=TrainConfig(**train),
        ),
    )


def _gpt2(
    name: str, about: str, *, layers: int, heads: int, embed: int, lr: float, remat: Any = "auto", steps: int = 19073
) -> Preset:
    """One of GPT-2's sizes: 1024 positions, its own tokenizer, 10 billion tokens in steps of 524288."""
    model = ModelConfig(preset=name, layers=layers, heads=heads, embed=embed, mlp=4 * embed, context=1024)
    train = TrainConfig(
        steps=steps,
        batch_tokens=524288,
        remat=remat,
        eval_every=250,
        eval_tokens=1048576,
    )
    config = Config(
        model=model,
        data=DataConfig(tokenizer="gpt2", holdout=0.005),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=700),
        train=train,
    )
    config = replace(config, run=replace(config.run, checkpoint_every=100))
    return Preset(f"podling train --model {name} --data PATH", about, config)


PRESETS: dict[str, Preset] = {
    "gpt2-nano": _laptop(
        "gpt2-nano",
        "podling train --model gpt2-nano",
        "Any CPU, well under a minute: to see that everything works. 0.5M parameters.",
        layers=2, embed=128, context=128, vocab=1024, lr=3e-3, warmup=20,
        steps=200, batch_tokens=2048, eval_every=100, eval_tokens=32768, samples=5,
    ),
    "gpt2-micro": Preset(
        "podling train",
        "Two CPU cores, about three minutes of training: the default. 2.2M parameters.",
        Config(),
    ),
    "gpt2-mini": _laptop(
        "gpt2-mini",
        "podling train --model gpt2-mini --data PATH",
        "A laptop over lunch, or a minute on an accelerator. 12M parameters.",
        layers=6, embed=384, context=256, vocab=4096, lr=1e-3, warmup=100,
        steps=2000, batch_tokens=16384, eval_every=250, eval_tokens=262144,
    ),
    "gpt2": _gpt2(
        "gpt2",
        "One accelerator or more. 124M parameters. The same recipe is published at 3.28 nats per token on FineWeb "
        "after 10 billion tokens (llm.c, discussion 481).",
        layers=12, heads=12, embed=768, lr=6e-4,
    ),
    "gpt2-medium": _gpt2(
        "gpt2-medium", "Several accelerators. 355M parameters.",
        layers=24, heads=16, embed=1024, lr=3e-4,
    ),
    "gpt2-large": _gpt2(
        "gpt2-large", "Several accelerators. 774M parameters.",
        layers=36, heads=20, embed=1280, lr=2.5e-4, remat="full",
    ),
    "gpt2-xl": _gpt2(
        "gpt2-xl", "A pod. 1558M parameters.",
        layers=48, heads=25, embed=1600, lr=2e-4, remat="full",
    ),
}  # fmt: skip


def preset_config(name: str) -> Config:
    """The configuration of a preset.

    Raises:
        InputError: no preset has this name; the nearest one is named.
    """
    if name not in PRESETS:
        raise InputError(unknown_preset(name))
    return PRESETS[name].config


def unknown_preset(name: str) -> Problem:
    """What to say about a name that is no preset."""
    hint = did_you_mean(name, PRESETS)
    known = f"known: {', '.join(PRESETS)}"
    return Problem("--model", f"there is no preset {name!r}", hint if hint == known else f"{hint} {known}")
