"""A small text and a small run that several files train."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from collector import Collector
from watching import Watched, watch

from podling.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig


@pytest.fixture(scope="session")
def make_run(tmp_path_factory) -> Callable[..., Config]:
    """Gives a configuration of sixteen rows a step, which eight devices and every mesh of theirs can share."""
    folder = tmp_path_factory.mktemp("processes")
    draw = random.Random(0)
    subjects, verbs, objects = ("the cat", "a dog", "this bird"), ("sees", "hears", "follows"), ("a mouse", "the ball")
    sentences = (f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}." for _ in range(1500))
    (folder / "animals.txt").write_text("\n".join(sentences))

    def make(out: Path, *, mesh: str = "auto", **sections: dict[str, Any]) -> Config:
        config = Config(
            model=ModelConfig(preset="gpt2-nano", layers=1, heads=8, embed=64, mlp=64, context=16),
            data=DataConfig(paths=(str(folder / "animals.txt"),), tokenizer="bytes", cache=str(folder / "cache")),
            optimizer=OptimizerConfig(lr=3e-3, warmup_steps=2),
            train=TrainConfig(steps=9, batch_tokens=256, eval_every=5, eval_tokens=1024, samples=0),
            run=RunConfig(out=str(out), mesh=mesh, checkpoint_every=4, tensorboard=False, export=False),
        )
        changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
        return dataclasses.replace(config, **changed)

    return make


@dataclass
class Whole:
    """A run on eight devices that was left in peace."""

    config: Config
    summary: dict[str, Any]
    seen: Watched


@pytest.fixture(scope="session")
def whole(make_run, tmp_path_factory) -> Whole:
    """What a run that is moved about is compared with."""
    from podling.train.start import train

    config = make_run(tmp_path_factory.mktemp("whole") / "run")
    with watch() as seen:
        return Whole(config, train(config, Collector()), seen)
