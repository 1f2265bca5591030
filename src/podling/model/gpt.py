"""GPT-2 (Radford et al. 2019) as pure functions: pre-LayerNorm blocks, tanh GELU, learned positions, tied head.

`block` is the model; `forward` runs it over the stacked layers. Training and decoding differ only in the `attend`
they hand to it. Axis letters are those of `podling.model.spec`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podling.config import ModelConfig
from podling.model.attention import MASKED, causal_attention
from podling.model.form import Form
from podling.model.ops import add_bias, dropout, einsum, layer_norm
from podling.model.remat import rematerialised
from podling.model.spec import Block, Params, compute_params, param_specs
from podling.parallel.collectives import enter, leave, live, look_up, platform, spread, summand_spec

Heads = Float[Array, "B T H K"]
Attend = Callable[[Heads, Heads, Heads], Heads]


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    form: Form = Form(),  # noqa: B008 - frozen
    dropout_key: jax.Array | None = None,
) -> Float[Array, "B T D"]:
    """Hidden states after the final LayerNorm; `logits` or `cross_entropy` turn them into predictions.

    Args:
        params: float32, as stored.
        tokens: ids below `cfg.vocab_size`, T <= context. JAX clamps ids out of range silently, so ids are checked
            where data is made.
        cfg: sizes; static under jit.
        dtype: compute precision; parameters are float32 and cast where they are used.
        form: how it is run.
        dropout_key: None turns dropout off.

    Raises:
        ValueError: while tracing: more tokens than the model has positions (JAX would clamp them).
    """
    if tokens.shape[1] > cfg.context:
        raise ValueError(f"{tokens.shape[1]} tokens, and the model's context is {cfg.context}")
    attention = causal_attention(form.attention, tokens.shape[1], cfg.dropout)

    def layer(x: Float[Array, "B T D"], inputs: tuple[Block, Array]) -> tuple[Float[Array, "B T D"], None]:
        p, index = inputs
        keys = layer_keys(dropout_key, index)
        return block(x, p, cfg, lambda q, k, v: attention(q, k, v, keys[0]), dropout_keys=keys[1:]), None

    with jax.named_scope("embedding"):
        x = embed(params, tokens, None, cfg, dtype)
        x = dropout(x, cfg.dropout, None if dropout_key is None else jax.random.fold_in(dropout_key, cfg.layers))
    # Nothing to compute again: the marks of a checkpoint would only keep XLA from fusing across them.
    plain = form.remat == "none" and form.layers == "unroll" and platform() == "cpu"
    plain = plain and not (live("fsdp") or live("tensor"))
    one_layer = layer if plain else rematerialised(layer, form.remat, in_loop=form.layers == "scan")
    if form.layers == "unroll":
        for index in range(cfg.layers):
            x, _ = one_layer(x, (jax.tree.map(lambda leaf: leaf[index], params.blocks), jnp.int32(index)))  # noqa: B023
    else:
        x, _ = jax.lax.scan(one_layer, x, (params.blocks, jnp.arange(cfg.layers)))
    with jax.named_scope("final_norm"):
        return layer_norm(x, params.final_scale, params.final_bias)


def layer_keys(key: jax.Array | None, index: Array) -> tuple[jax.Array | None, ...]:
    """One layer's dropout keys: attention weights, attention output, MLP output."""
    return (None, None, None) if key is None else tuple(jax.random.split(jax.random.fold_in(key, index), 3))


def embed(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None,
    cfg: ModelConfig,
    dtype: Any,
) -> Float[Array, "B T D"]:
    """Token plus position embeddings in the compute dtype; without `positions` every row begins at the first."""
    x = look_up(params.token_embed, tokens, dtype)
    places = compute_params(params.pos_embed, param_specs(cfg).pos_embed, dtype)
    if positions is None:
        return x + spread(places[: tokens.shape[1]], x, (1, 2))
    return x + places[positions]


def block(
    x: Float[Array, "B T D"],
    p: Block,
    cfg: ModelConfig,
    attend: Attend,
    *,
    dropout_keys: tuple[jax.Array | None, ...] = (None, None),
) -> Float[Array, "B T D"]:
    """One pre-LayerNorm transformer block.

    Args:
        x: the residual stream in the compute dtype.
        p: one layer's parameters (no layer axis), float32 as stored; gathered here, so that under remat the backward
            pass gathers them again and no device keeps more than one layer's full weights.
        cfg: sizes.
        attend: maps queries, keys and values to attention outputs; closes over the mask or the KV cache.
        dropout_keys: for the two additions to the residual stream.
    """
    p = compute_params(p, param_specs(cfg).blocks, x.dtype)
    with jax.named_scope("attention"):
        h = enter(layer_norm(x, p.ln1_scale, p.ln1_bias))
        qkv = map(add_bias, qkv_products(h, p.qkv_kernel), thirds(p.qkv_bias))
        h = attend(*(part.reshape(*part.shape[:2], cfg.heads, cfg.head_dim) for part in qkv))
        h = h.reshape(*h.shape[:2], cfg.heads * cfg.head_dim)
        h = leave(einsum("btn,nd->btd", h, p.out_kernel, out_spec=summand_spec()))
        x = x + dropout(add_bias(h, p.out_bias), cfg.dropout, dropout_keys[0])
    with jax.named_scope("mlp"):
        h = einsum("btd,df->btf", enter(layer_norm(x, p.ln2_scale, p.ln2_bias)), p.up_kernel)
        h = jax.nn.gelu(add_bias(h, p.up_bias), approximate=True)
        h = leave(einsum("btf,fd->btd", h, p.down_kernel, out_spec=summand_spec()))
        return x + dropout(add_bias(h, p.down_bias), cfg.dropout, dropout_keys[1])


def qkv_products(h: Float[Array, "B T D"], kernel: Array) -> list[Float[Array, "B T N"]]:
    """Queries, keys and values before their bias. The kernel is [3, D, N] as stored, or [D, 3N] for decoding.

    Three products where there is a backward pass: one product's result would be cut up by copying it.
    """
    if kernel.ndim == 3:
        return [einsum("btd,dn->btn", h, third) for third in thirds(kernel)]
    return jnp.split(einsum("btd,dm->btm", h, kernel), 3, axis=-1)


def thirds(stacked: Array) -> list[Array]:
    """What is stored for queries, keys and values, apart."""
    return [jax.lax.index_in_dim(stacked, index, keepdims=False) for index in range(3)]


def logits(params: Params, hidden: Float[Array, "B T D"], cfg: ModelConfig) -> Float[Array, "B T V"]:
    """Float32 scores of every vocabulary entry, padding included."""
    table = compute_params(params.token_embed, param_specs(cfg).token_embed, hidden.dtype)
    return head(table, enter(hidden), cfg)


def head(table: Float[Array, "V D"], hidden: Float[Array, "B T D"], cfg: ModelConfig) -> Float[Array, "B T V"]:
    """The tied output projection, with the columns that only pad the vocabulary put where they can never win."""
    scores = einsum("btd,vd->btv", hidden, table, out_dtype=jnp.float32)
    if table.shape[0] == cfg.vocab_size:
        return scores
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2, out_sharding=jax.typeof(scores).sharding)
    return jnp.where(column < cfg.vocab_size, scores, MASKED)
