"""200 steps with the derivatives written by hand, beside 200 with those that JAX finds of the plain definitions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from podling.model.gpt import head
from podling.train.step import DeviceBatch, init_state, make_train_step

STEPS = 200
CONFIG = Config(
    model=ModelConfig(layers=2, heads=2, embed=32, mlp=64, context=16, vocab_size=96),
    optimizer=OptimizerConfig(lr=3e-3, warmup_steps=20),
    train=TrainConfig(steps=STEPS, loss_chunk=4),
)


def plain_layer_norm(x, scale, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return normed * scale[None, None] + bias[None, None]


def plain_cross_entropy(params, hidden, targets, weights, cfg, *, chunk):
    del chunk
    scores = jax.nn.log_softmax(head(params.token_embed, hidden, cfg))
    nll = -jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0] * weights
    return jnp.sum(nll), nll


def losses(config: Config) -> np.ndarray:
    """Of every step, on text in which the next token follows from the last by a rule nine times in ten."""
    rng = np.random.default_rng(0)
    tokens = np.zeros((STEPS, 1, 8, config.model.context + 1), np.int32)
    tokens[..., 0] = rng.integers(0, 96, tokens.shape[:-1])
    for place in range(1, tokens.shape[-1]):
        chance = rng.random(tokens.shape[:-1]) < 0.1
        tokens[..., place] = np.where(chance, rng.integers(0, 96, chance.shape), (5 * tokens[..., place - 1] + 7) % 96)
    batches = DeviceBatch(tokens[..., :-1], tokens[..., 1:], np.ones(tokens[..., 1:].shape, np.float32))
    step = make_train_step(config, jnp.float32)

    def one(state, batch):
        state, metrics = step(state, batch)
        return state, metrics.loss

    return np.asarray(jax.jit(lambda state: jax.lax.scan(one, state, batches))(init_state(config))[1])


@pytest.mark.parametrize("chosen", [{}, {"layer_loop": "unroll", "remat": "dots"}])
def test_two_hundred_steps_are_those_of_the_plain_derivatives(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]):
    ours = losses(replace(CONFIG, train=replace(CONFIG.train, **chosen)))
    monkeypatch.setattr("podling.model.gpt.layer_norm", plain_layer_norm)
    monkeypatch.setattr("podling.train.step.token_cross_entropy", plain_cross_entropy)
    plain = losses(CONFIG)
    assert plain[-1] < plain[0] - 2
    np.testing.assert_allclose(ours, plain, atol=1e-4)
