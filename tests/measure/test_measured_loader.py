"""Made-up shards, and the speed of what comes out of them."""

import time

import numpy as np

from podling.config import Config, ModelConfig, RunConfig, TrainConfig
from podling.data.batches import Batch
from podling.measure import loader
from podling.measure.loader import batches_of, loader_tokens_per_s, made_up
from podling.measure.steps import resolved
from podling.train.setup import Setup

CONFIG = Config(
    model=ModelConfig(layers=1, heads=1, embed=8, mlp=8, context=16),
    train=TrainConfig(batch_tokens=256),
    run=RunConfig(mesh="data=8"),
)


def test_made_up_shards_are_read_as_any_others(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "LEAST_TOKENS", 1000)
    setup = Setup.of(resolved(CONFIG, 70_000))  # more than 16 bits
    prepared = made_up(tmp_path, setup)
    tokens = prepared.tokens("train")
    assert len(tokens) == 8 * 256 + 1
    assert 65_536 < int(tokens[:].max()) < 70_000
    batch = batches_of(prepared, setup).batch(0)
    assert batch.inputs.shape == (1, 16, 16)
    rows = {tuple(tokens[start : start + 16].tolist()) for start in range(0, 2048, 16)}
    assert {tuple(row) for row in batch.inputs[0].tolist()} <= rows
    np.testing.assert_array_equal(batch.inputs[0, :, 1:], batch.targets[0, :, :-1])
    other = made_up(tmp_path / ".." / tmp_path.name, setup, seed=1)
    assert other.fingerprint != prepared.fingerprint


def test_the_speed_is_that_of_the_batches():
    class Slow:
        def iterate(self):
            piece = np.zeros((1, 10, 10), np.int32)
            while True:
                time.sleep(0.02)
                yield Batch(piece, piece, piece)

    assert 1000 < loader_tokens_per_s(Slow(), 0.2) <= 5000  # type: ignore[arg-type]
