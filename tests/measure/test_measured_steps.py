"""The step that a bench takes is training's own."""

import time

import jax
import numpy as np
import pytest

from podling.config import Config, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from podling.measure.steps import Steps, in_turn, resolved
from podling.train.setup import Setup
from podling.train.step import DeviceBatch, init_state, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = Config(
    model=ModelConfig(layers=2, heads=2, embed=16, mlp=32, context=8),
    optimizer=OptimizerConfig(warmup_steps=1),
    train=TrainConfig(tokens=10 * 64, batch_tokens=64, micro_batch=4),
    run=RunConfig(mesh="data=2,fsdp=2,tensor=2"),
)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup.of(resolved(CONFIG, 50))


def test_resolved_as_data_would(setup):
    train = setup.config.train
    assert (setup.config.model.vocab_size, train.steps, train.tokens) == (50, 10, 0)
    assert (setup.plan.micro_steps, setup.plan.micro_batch, setup.plan.tokens) == (2, 4, 64)
    assert resolved(setup.config, 99).model.vocab_size == 50


def test_losses_are_those_of_the_plain_step(setup):
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8, 9), np.int32)
    with jax.set_mesh(setup.mesh):
        steps = Steps(setup, in_turn(tokens, setup.plan))
        taken = steps.take(3)
        state, plain = init_state(setup.config), jax.jit(make_train_step(setup.config, setup.dtype))
        wanted = []
        for number in (0, 1, 0):
            window = tokens[number]
            inputs, targets = window[:, :-1].reshape(2, 4, 8), window[:, 1:].reshape(2, 4, 8)
            batch = DeviceBatch(inputs, targets, np.ones((2, 4, 8), np.float32))
            state, metrics = plain(state, steps.put(batch))
            wanted.append(float(metrics.loss))
    np.testing.assert_allclose([one.loss for one in taken], wanted, rtol=1e-5)
    assert wanted[0] != wanted[1]
    assert taken[0].done_s < taken[1].done_s < taken[2].done_s
    assert int(steps.state.step) == 3


def test_time_is_up_and_what_was_waited_for(setup):
    def slowly():
        for number, batch in enumerate(in_turn(np.zeros((1, 8, 9), np.int32), setup.plan)):
            time.sleep(0.05 * (number > 0))
            yield batch

    with jax.set_mesh(setup.mesh):
        steps = Steps(setup, slowly())
        assert len(steps.take(5, until_s=time.perf_counter() - 1)) == 1
        assert steps.take(0) == []
        waited = [one.wait_s for one in steps.take(2)]
    assert min(waited) >= 0.05
