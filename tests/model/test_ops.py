"""The small operations against closed forms in NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.model.attention import attention, causal_mask
from podling.model.ops import add_bias, dropout, einsum, layer_norm

pytestmark = pytest.mark.usefixtures("quick_compile")


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def f32(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def test_layer_norm_is_its_closed_form():
    x, scale, bias = 3 * draw(0, 2, 5, 16) + 1, draw(1, 16), draw(2, 16)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * scale + bias
    np.testing.assert_allclose(layer_norm(f32(x), f32(scale), f32(bias)), expected, atol=5e-6)


def test_layer_norm_adds_epsilon_to_the_variance():
    """On nearly constant rows epsilon decides the result."""
    x = 1e-3 * draw(0, 3, 8)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer_norm(f32(x), jnp.ones(8), jnp.zeros(8)), expected, rtol=1e-4, atol=1e-6)


def test_layer_norm_has_float32_statistics_under_bfloat16():
    """Mean 300 and spread 1: in bfloat16 neighbouring numbers at 300 lie 2 apart, and their squares 256."""
    x = jnp.asarray(300 + 4 * draw(0, 4, 64), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    out = layer_norm(x, jnp.ones(64), jnp.zeros(64))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02)  # bfloat16 rounds 4 to 1/64


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_layer_norm_has_the_gradient_of_its_closed_form(mean: float):
    """Against JAX's derivative of the definition, by x, scale and bias."""
    x, scale, bias, out = mean + 3 * draw(0, 2, 5, 16), draw(1, 16), draw(2, 16), draw(3, 2, 5, 16)

    def plain(x, scale, bias):
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale[None, None]
            + bias[None, None]
        )

    given = (f32(x), f32(scale), f32(bias))
    got = jax.grad(lambda *args: jnp.sum(layer_norm(*args) * f32(out)), argnums=(0, 1, 2))(*given)
    expected = jax.grad(lambda *args: jnp.sum(plain(*args) * f32(out)), argnums=(0, 1, 2))(*given)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=2e-5 * float(np.abs(other).max()))


def test_layer_norm_keeps_x_and_two_numbers_a_row_for_the_backward_pass():
    x = jnp.ones((4, 6, 16), jnp.bfloat16)
    _, pull = jax.vjp(lambda x: layer_norm(x, jnp.ones(16), jnp.zeros(16)), x)
    kept = sorted(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull) if hasattr(leaf, "dtype"))
    assert sum(kept) <= 4 * 6 * 16 * 2 + 2 * 4 * 6 * 4 + 4 * 16 * 4  # bfloat16 x, two float32 rows, and vectors


def test_a_bias_is_added_and_its_gradient_summed_in_float32():
    """4,096 gradients of 1/256: in bfloat16 a sum stops growing at 1."""
    x, bias = jnp.full((64, 64, 8), 1.0, jnp.bfloat16), jnp.full(8, 2.0**-10)
    weight = jnp.full((64, 64, 8), 2.0**-8, jnp.bfloat16)
    grad = jax.grad(lambda bias: jnp.sum(add_bias(x, bias) * weight, dtype=jnp.float32))(bias)
    assert add_bias(x, bias).dtype == jnp.bfloat16
    np.testing.assert_allclose(grad, 16.0, rtol=1e-6)
    np.testing.assert_array_equal(add_bias(x[0, 0].astype(jnp.float32), bias), np.float32(1 + 2.0**-10))


def reference_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One query at a time; mask [B, T, S]."""
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        scores = np.array([q[b, t, h] @ k[b, s, h] for s in seen]) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, h] = sum(weight * v[b, s, h] for weight, s in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize("kind", ["causal", "everything", "by row"])
def test_attention_against_one_query_at_a_time(kind: str):
    batch, queries, keys, heads, width = 2, 5, (5 if kind == "causal" else 7), 3, 4
    q = 2 * draw(0, batch, queries, heads, width)
    k, v = 2 * draw(1, batch, keys, heads, width), draw(2, batch, keys, heads, width)
    if kind == "by row":
        mask = np.random.default_rng(3).random((batch, queries, keys)) < 0.4
        mask[..., 0] = True  # every query sees something
        given = jnp.asarray(mask)
    else:
        square = np.tril(np.ones((queries, keys), bool)) if kind == "causal" else np.ones((queries, keys), bool)
        mask = np.broadcast_to(square, (batch, queries, keys))
        given = causal_mask(queries) if kind == "causal" else jnp.asarray(square)
    out = attention(f32(q), f32(k), f32(v), given)
    np.testing.assert_allclose(out, reference_attention(q, k, v, mask), atol=5e-6)


def test_attention_that_sees_nothing_is_finite():
    q = f32(draw(0, 1, 2, 1, 4))
    out, grad = jax.value_and_grad(lambda q: attention(q, q, q, jnp.zeros((2, 2), bool)).sum())(q)
    assert np.isfinite(out) and np.isfinite(grad).all()


def test_attention_softmax_is_float32_under_bfloat16():
    """256 equal scores: each weight is 1/256 and they sum to 1, which a bfloat16 sum of that many cannot reach."""
    k = jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    out = attention(k[:, :1], k, v, jnp.ones((1, 1024), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


def test_einsum_float32_means_float32():
    """On a TPU float32 products default to bfloat16 passes; the program must ask for more than that."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = jax.jit(lambda x, y: einsum("ij,jk->ik", x, y)).lower(x, x).as_text()
    assert "HIGHEST" in text
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    lowered = jax.jit(lambda x, y: einsum("ij,jk->ik", x, y, out_dtype=jnp.float32)).lower(half, half)
    assert "HIGHEST" not in lowered.as_text() and lowered.out_info.dtype == jnp.float32


RATE = 0.3


def test_dropout_drops_its_share_and_scales_the_rest():
    x = jnp.full((200, 500), 7.0)
    out = np.asarray(dropout(x, RATE, jax.random.key(0)))
    kept = out != 0
    np.testing.assert_allclose(out[kept], 7.0 / (1 - RATE), rtol=1e-6)
    # 100,000 draws: five standard deviations.
    assert abs(kept.mean() - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / kept.size)
    assert abs(kept.mean(0) - (1 - RATE)).max() < 6 * np.sqrt(RATE * (1 - RATE) / 200)  # in every column


def test_dropout_is_its_key_alone():
    x = jnp.ones((64, 64))
    first, again, other = (np.asarray(dropout(x, RATE, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.2


def test_dropout_without_a_key_or_a_rate_is_nothing():
    x = jnp.ones((4, 4))
    assert dropout(x, RATE, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_dropout_gradient_passes_where_the_value_does():
    x, key = jnp.full((100,), 2.0), jax.random.key(3)
    grad = jax.grad(lambda x: dropout(x, RATE, key).sum())(x)
    np.testing.assert_allclose(grad, dropout(x, RATE, key) / 2.0, rtol=1e-6)
