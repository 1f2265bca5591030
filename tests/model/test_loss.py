"""The loss against NumPy, in one piece and in chunks."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.loss import cross_entropy
from podling.model.spec import init_params

CFG = ModelConfig(layers=1, heads=1, embed=8, mlp=8, context=12, vocab_size=200)
ROWS = 2


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 40 * leaf, init_params(CFG, key=jax.random.key(0)))
    hidden = jnp.asarray(rng.normal(size=(ROWS, CFG.context, CFG.embed)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, CFG.vocab_size, (ROWS, CFG.context)), jnp.int32)
    weights = jnp.asarray(rng.choice([0.0, 0.5, 1.0, 3.0], (ROWS, CFG.context)), jnp.float32)
    return params, hidden, targets, weights


def value_and_grads(problem, chunk: int, cfg: ModelConfig = CFG):
    params, hidden, targets, weights = problem

    def loss(table, hidden):
        return cross_entropy(
            params.__class__(table, params.pos_embed, params.blocks, params.final_scale, params.final_bias),
            hidden, targets, weights, cfg, chunk=chunk,
        )  # fmt: skip

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params.token_embed, hidden)


def test_loss_is_its_closed_form(problem):
    params, hidden, targets, weights = problem
    table = np.asarray(params.token_embed, np.float64)[: CFG.vocab_size]
    scores = np.asarray(hidden, np.float64) @ table.T
    nll = 0.0
    for place in np.ndindex(ROWS, CFG.context):
        row = scores[place]
        nll += float(weights[place]) * (np.log(np.exp(row - row.max()).sum()) + row.max() - row[targets[place]])
    total, count = cross_entropy(params, hidden, targets, weights, CFG)
    assert nll > 50
    np.testing.assert_allclose(total, nll, rtol=1e-6)
    np.testing.assert_allclose(count, np.asarray(weights).sum(), rtol=1e-7)
    assert total.dtype == count.dtype == jnp.float32


def test_weight_zero_leaves_a_position_out(problem):
    params, hidden, targets, weights = problem
    hole = np.asarray(weights) == 0
    assert hole.any()
    other = jnp.where(hole, (targets + 1) % CFG.vocab_size, targets)
    same = cross_entropy(params, jnp.where(hole[..., None], 9.0, hidden), other, weights, CFG)
    np.testing.assert_array_equal(same[0], cross_entropy(params, hidden, targets, weights, CFG)[0])


@pytest.mark.parametrize("chunk", [size for size in range(1, CFG.context + 1) if CFG.context % size == 0])
def test_every_chunk_size_gives_the_same_loss_and_gradients(problem, chunk):
    (whole, count), whole_grads = value_and_grads(problem, 0)
    (value, chunk_count), grads = value_and_grads(problem, chunk)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    np.testing.assert_array_equal(chunk_count, count)
    for got, expected in zip(grads, whole_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6 * float(np.abs(expected).max()))


def plain_sum(table, hidden, targets, weights):
    """The same by indexing, for JAX to differentiate."""
    scores = jnp.einsum("btd,vd->btv", hidden, table, precision="highest")[..., : CFG.vocab_size]
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.sum((jax.nn.logsumexp(scores, axis=-1) - picked) * weights)


@pytest.mark.parametrize("chunk", [0, 4])
def test_its_own_gradient_is_that_of_the_plain_loss(problem, chunk):
    """Of table, hidden states and weights, under a factor that arrives from what is made of the sum."""
    params, hidden, targets, weights = problem

    def own(table, hidden, weights):
        mine = dataclasses.replace(params, token_embed=table)
        return jnp.square(cross_entropy(mine, hidden, targets, weights, CFG, chunk=chunk)[0] / 40)

    def plain(table, hidden, weights):
        return jnp.square(plain_sum(table, hidden, targets, weights) / 40)

    given = (params.token_embed, hidden, weights)
    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*given) for f in (own, plain))
    for one, other in zip(got, expected, strict=True):
        assert float(np.abs(other).max()) > 1
        np.testing.assert_allclose(one, other, atol=2e-6 * float(np.abs(other).max()))


def test_the_backward_pass_has_three_products_and_not_four(problem):
    """The logits, and the gradients of both their factors: nothing is computed twice, in chunks or not."""
    params, hidden, targets, weights = problem
    for chunk in (0, 4):
        loss = lambda params, hidden: cross_entropy(params, hidden, targets, weights, CFG, chunk=chunk)[0]  # noqa: B023, E731
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, hidden))
        assert text.count("dot_general[") == 3


def buffers_of(chunk: int) -> set[tuple[int, ...]]:
    """Every array shape in the optimised program of the loss and its gradients; sizes no other dimension has."""
    cfg = ModelConfig(layers=1, heads=1, embed=8, mlp=8, context=96, vocab_size=1664)
    params = init_params(cfg, key=jax.random.key(0))

    def loss(params, hidden, targets, weights):
        return cross_entropy(params, hidden, targets, weights, cfg, chunk=chunk)[0]

    shape = (3, cfg.context)
    args = (
        params,
        jax.ShapeDtypeStruct((*shape, cfg.embed), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args).compile().as_text()
    return {tuple(int(size) for size in found.split(",")) for found in re.findall(r"\b(?:f32|pred)\[([\d,]+)\]", text)}


def test_chunks_keep_full_logits_from_existing():
    full = 3 * 96 * 1664
    assert max(int(np.prod(shape)) for shape in buffers_of(0)) >= full  # the search does find them
    chunked = buffers_of(16)
    assert max(int(np.prod(shape)) for shape in chunked) <= full // 6
    assert any(int(np.prod(shape)) == full // 6 for shape in chunked)


def test_the_loss_is_float32_under_bfloat16(problem):
    params, hidden, targets, weights = problem
    half = hidden.astype(jnp.bfloat16)
    value, _ = cross_entropy(params, half, targets, weights, CFG)
    table = np.asarray(params.token_embed.astype(jnp.bfloat16), np.float64)[: CFG.vocab_size]
    scores = np.asarray(half, np.float64) @ table.T
    lse = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    picked = np.take_along_axis(scores, np.asarray(targets)[..., None], -1)[..., 0]
    assert value.dtype == jnp.float32
    # Products of bfloat16 numbers are exact in float32: only a bfloat16 sum or softmax would be off by more.
    np.testing.assert_allclose(value, ((lse - picked) * np.asarray(weights)).sum(), rtol=1e-5)
