"""FLOPs of a token, against a count by hand and against XLA's own."""

import dataclasses

import jax
import jax.numpy as jnp

from podling.config import Config, ModelConfig
from podling.model.spec import param_count
from podling.presets import preset_config
from podling.train.flops import flops_per_token
from podling.train.step import DeviceBatch, init_state, sum_gradients


def test_gpt2_by_hand():
    """124M: 85M weights in blocks and 38.6M in the head at 6 each, and attention at 12 x 12 x 768 x 1024."""
    cfg = dataclasses.replace(preset_config("gpt2").model, vocab_size=50257)
    blocks, head, attention = 12 * 12 * 768**2, 50257 * 768, 12 * 12 * 768 * 1024
    assert flops_per_token(cfg) == 6 * (blocks + head) + attention
    # Positions, biases and LayerNorm take part in no matrix product.
    assert 0 < param_count(cfg) - (blocks + head) < 0.01 * param_count(cfg)


def test_xla_counts_about_the_same():
    """XLA counts every operation, elementwise ones too, and both halves of the masked scores."""
    cfg = ModelConfig(layers=1, heads=2, embed=64, mlp=256, context=32, vocab_size=128)
    config = Config(model=cfg)
    params = jax.eval_shape(lambda: init_state(config)).params
    shape = jax.ShapeDtypeStruct((1, 4, cfg.context), jnp.int32)
    batch = DeviceBatch(shape, shape, jax.ShapeDtypeStruct(shape.shape, jnp.float32))
    compiled = jax.jit(lambda p, b: sum_gradients(p, b, config, jnp.float32, None)).lower(params, batch).compile()
    counted = compiled.cost_analysis()["flops"] / (4 * cfg.context)
    assert 1.0 < counted / flops_per_token(cfg) < 1.25
