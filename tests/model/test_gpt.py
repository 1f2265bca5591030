"""The forward pass against the same model written in plain NumPy, and what must hold of it without a reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.attention import attention, causal_mask
from podling.model.form import Form
from podling.model.gpt import forward, layer_keys, logits
from podling.model.loss import cross_entropy
from podling.model.spec import Params, init_params

pytestmark = pytest.mark.usefixtures("quick_compile")

CFG = ModelConfig(layers=3, heads=2, embed=12, mlp=20, context=10, vocab_size=37)
TOKENS = np.random.default_rng(5).integers(0, CFG.vocab_size, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def params() -> Params:
    """Every leaf drawn, biases and LayerNorm too, and large enough that no operation is nearly linear."""
    rng = np.random.default_rng(0)
    initial = jax.jit(lambda: init_params(CFG, key=jax.random.key(0)))()

    def far_from_initial(leaf: jax.Array) -> jax.Array:
        scale = 0.4 if leaf.ndim > 1 else 1.0
        return leaf + jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32)

    drawn = jax.tree.map(far_from_initial, initial)
    real = np.arange(drawn.token_embed.shape[0])[:, None] < CFG.vocab_size
    return dataclasses.replace(drawn, token_embed=jnp.where(real, drawn.token_embed, 0.0))


def numpy_gpt2(params: Params, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, vocab] of one sequence, in float64, one head and one position at a time."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias

    width = CFG.embed // CFG.heads
    x = p.token_embed[tokens] + p.pos_embed[: len(tokens)]
    for i in range(CFG.layers):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], p.blocks)
        h = norm(x, w.ln1_scale, w.ln1_bias)
        q, k, v = (h @ w.qkv_kernel[j] + w.qkv_bias[j] for j in range(3))
        attended = np.zeros_like(h)
        for head in range(CFG.heads):
            part = slice(head * width, (head + 1) * width)
            for t in range(len(tokens)):
                scores = k[: t + 1, part] @ q[t, part] / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                attended[t, part] = weights / weights.sum() @ v[: t + 1, part]
        x = x + attended @ w.out_kernel + w.out_bias
        h = norm(x, w.ln2_scale, w.ln2_bias) @ w.up_kernel + w.up_bias
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w.down_kernel + w.down_bias
    return norm(x, p.final_scale, p.final_bias) @ p.token_embed[: CFG.vocab_size].T


def test_forward_is_gpt2(params):
    out = logits(params, forward(params, jnp.asarray(TOKENS), CFG), CFG)
    assert out.dtype == jnp.float32
    expected = np.stack([numpy_gpt2(params, row) for row in TOKENS])
    assert np.ptp(expected) > 5  # a comparison of small numbers would show little
    np.testing.assert_allclose(out[..., : CFG.vocab_size], expected, atol=3e-5)


def test_no_position_sees_a_later_one(params):
    """d hidden[t] / d position[s] is zero for every s > t and not for s <= t."""
    tokens = jnp.asarray(TOKENS[:1])

    def hidden(pos_embed: jax.Array) -> jax.Array:
        return forward(dataclasses.replace(params, pos_embed=pos_embed), tokens, CFG)[0].sum(-1)

    # The final LayerNorm removes the mean of a row: its scale, which differs by column, keeps the sum from vanishing.
    depends = np.abs(np.asarray(jax.jacrev(hidden)(params.pos_embed))).max(-1)[:, : tokens.shape[1]]
    np.testing.assert_array_equal(depends > 1e-7, np.tril(np.ones_like(depends, bool)))
    assert (depends[np.triu_indices_from(depends, 1)] == 0).all()


def test_a_later_token_changes_nothing_before_it(params):
    changed = TOKENS.copy()
    changed[:, 6] = (changed[:, 6] + 1) % CFG.vocab_size
    before, after = (np.asarray(forward(params, jnp.asarray(tokens), CFG)) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max(-1).min() > 1e-3


def loss_and_grads(params: Params, cfg: ModelConfig, **options) -> tuple[jax.Array, Params]:
    tokens = jnp.asarray(TOKENS)

    def loss(params: Params) -> jax.Array:
        hidden = forward(params, tokens[:, :-1], cfg, **options)
        return cross_entropy(params, hidden, tokens[:, 1:], jnp.ones(tokens[:, 1:].shape), cfg)[0]

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_same(got: tuple[jax.Array, Params], expected: tuple[jax.Array, Params], tolerance: float) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(expected[1]), strict=True
    ):
        largest = float(np.abs(other).max())
        np.testing.assert_allclose(leaf, other, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path))


def test_remat_changes_no_number(params):
    """With dropout: what is computed again must be dropped again."""
    cfg, key = dataclasses.replace(CFG, dropout=0.2), jax.random.key(1)
    plain = loss_and_grads(params, cfg, form=Form(remat="none"), dropout_key=key)
    for policy in ("dots", "full"):
        assert_same(loss_and_grads(params, cfg, form=Form(remat=policy), dropout_key=key), plain, 1e-6)


def test_remat_computes_again_what_it_says(params):
    """`full` repeats the block's matrix products in the backward pass, `dots` all but those of parameters."""
    tokens = jnp.asarray(TOKENS)

    def products(policy: str) -> int:
        def loss(params: Params) -> jax.Array:
            return forward(params, tokens, CFG, form=Form(remat=policy)).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general")

    counts = {policy: products(policy) for policy in ("none", "dots", "full")}
    # A block has four products with parameters and two in attention; the very last one's result is never needed.
    assert counts["none"] < counts["dots"] < counts["full"]
    assert counts["dots"] - counts["none"] == 2


def test_dropout_in_the_model(params):
    cfg = dataclasses.replace(CFG, dropout=0.2)
    tokens = jnp.asarray(TOKENS)
    run = jax.jit(lambda key: forward(params, tokens, cfg, dropout_key=key))
    plain = np.asarray(forward(params, tokens, CFG))
    np.testing.assert_array_equal(np.asarray(forward(params, tokens, cfg)), plain)  # no key: evaluation
    first, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - plain).max() > 0.1 and np.abs(first - other).max() > 0.1


def test_every_use_of_dropout_has_its_own_key():
    """Attention weights, attention output and MLP output of every layer, and the embedding."""
    key = jax.random.key(0)
    keys = [used for layer in range(CFG.layers) for used in layer_keys(key, jnp.int32(layer))]
    keys.append(jax.random.fold_in(key, CFG.layers))
    raw = {tuple(np.asarray(jax.random.key_data(used)).tolist()) for used in keys}
    assert len(raw) == 3 * CFG.layers + 1
    assert layer_keys(None, jnp.int32(0)) == (None, None, None)


def test_dropout_acts_on_the_embedding_and_both_additions(params):
    """All other places silenced, what is left of the randomness comes from the one."""
    cfg, tokens = dataclasses.replace(CFG, dropout=0.2), jnp.asarray(TOKENS)
    silent = jax.tree.map(jnp.zeros_like, params)
    silent = dataclasses.replace(silent, final_scale=params.final_scale)
    run = jax.jit(lambda params, key: forward(params, tokens, cfg, dropout_key=key))
    places = {
        "embedding": {"token_embed": params.token_embed},
        "attention output": {"blocks": dataclasses.replace(silent.blocks, out_bias=params.blocks.out_bias)},
        "mlp output": {"blocks": dataclasses.replace(silent.blocks, down_bias=params.blocks.down_bias)},
    }
    for place, heard in places.items():
        first, other = (run(dataclasses.replace(silent, **heard), jax.random.key(seed)) for seed in (0, 1))
        assert np.abs(first - other).max() > 0.1, place
    assert (np.asarray(run(silent, jax.random.key(0))) == 0).all()


def test_dropped_attention_weights_are_not_made_up_for():
    """Position 0 sees one key, and loses it a fifth of the time."""
    q = jnp.ones((400, 1, 1, 4))
    out = attention(q, q, q, causal_mask(1), dropout_rate=0.2, dropout_key=jax.random.key(0))[:, 0, 0, 0]
    assert set(np.asarray(out).tolist()) == {0.0, 1.25}
    assert abs(np.mean(np.asarray(out) == 0) - 0.2) < 5 * np.sqrt(0.16 / 400)


def test_padding_columns_never_get_probability(params):
    loud = dataclasses.replace(params, token_embed=params.token_embed.at[CFG.vocab_size :].set(50.0))
    out = logits(loud, forward(loud, jnp.asarray(TOKENS), CFG), CFG)
    assert out.shape[-1] == 128
    probability = np.asarray(jax.nn.softmax(out, -1))
    assert (probability[..., CFG.vocab_size :] == 0).all()
    np.testing.assert_allclose(probability[..., : CFG.vocab_size].sum(-1), 1, rtol=1e-5)
    quiet = logits(params, forward(params, jnp.asarray(TOKENS), CFG), CFG)
    np.testing.assert_array_equal(out[..., : CFG.vocab_size], quiet[..., : CFG.vocab_size])


def test_padding_rows_get_no_gradient(params):
    loud = dataclasses.replace(params, token_embed=params.token_embed.at[CFG.vocab_size :].set(2.0))
    for chunked in (params, loud):
        grad = np.asarray(loss_and_grads(chunked, CFG)[1].token_embed)
        assert (grad[CFG.vocab_size :] == 0).all()
        assert (np.abs(grad[: CFG.vocab_size]).max(-1) > 0).all()


def test_a_full_vocabulary_has_no_padding():
    cfg = dataclasses.replace(CFG, vocab_size=128)
    params = init_params(cfg, key=jax.random.key(0))
    out = logits(params, forward(params, jnp.asarray(TOKENS), cfg), cfg)
    assert out.shape[-1] == 128 and np.asarray(out).min() > -100


def test_bfloat16_computes_in_bfloat16_and_keeps_the_rest_in_float32(params):
    tokens = jnp.asarray(TOKENS)
    assert forward(params, tokens, CFG, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    (loss, grads), (exact, exact_grads) = (
        loss_and_grads(params, CFG, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert loss != exact
    np.testing.assert_allclose(loss, exact, rtol=0.02)  # eight bits of mantissa
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        angle = np.vdot(got, expected) / (np.linalg.norm(got) * np.linalg.norm(expected))
        assert angle > 0.98
    # Matrix products run in bfloat16; the head adds up in float32.
    text = str(jax.make_jaxpr(lambda p: logits(p, forward(p, tokens, CFG, dtype=jnp.bfloat16), CFG))(params))
    products = [line for line in text.splitlines() if "dot_general[" in line]
    assert len(products) == 9 and all(":bf16" in line or ":f32" in line for line in products)
    assert sum(":f32" in line for line in products) == 2  # attention scores and logits


def test_more_tokens_than_positions_are_refused():
    """JAX clamps positions as it clamps ids: the rest of the text would stand at the last one."""
    with pytest.raises(ValueError, match="17 tokens, and the model's context is 16"):
        forward(None, jnp.zeros((1, 17), jnp.int32), ModelConfig(context=16))  # type: ignore[arg-type]
