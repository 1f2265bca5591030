"""The forward pass with a key/value cache: the `block` of `gpt.py`, with an `attend` that reads and writes a cache.

A batch holds rows of different lengths: every token comes with its own position, is stored there, and sees what its
row holds at positions up to its own. Prompts are padded on the right; what padding leaves in the cache lies beyond
the row's positions and is overwritten before it can be seen. S cache positions; other letters as in `model.spec`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podling.config import ModelConfig
from podling.model.attention import attention
from podling.model.gpt import block, embed
from podling.model.ops import layer_norm
from podling.model.spec import Block, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, in the compute dtype."""

    k: Float[Array, "L B S H K"]
    v: Float[Array, "L B S H K"]


def empty_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """A cache for `rows` rows of up to `length` positions (at most the context)."""
    shape = (cfg.layers, rows, length, cfg.heads, cfg.head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def forward_cached(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    cfg: ModelConfig,
    *,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Hidden states after the final LayerNorm, and the cache with these tokens in it.

    Prefill is a call with T prompt tokens, decoding a call with T = 1; both equal `forward` on the whole sequence.
    Runs on one device, outside a mesh.

    Args:
        params: see `gpt.forward`.
        tokens: ids below `cfg.vocab_size`.
        positions: each token's place in its row, below S; every smaller place must hold a token already or now.
        cache: keys and values of the smaller places.
        cfg: the model.
        dtype: compute precision, the cache's.
    """
    rows = jnp.arange(tokens.shape[0])[:, None]
    # [B, T, S]: a token sees the places up to its own.
    mask = jnp.arange(cache.k.shape[2])[None, None] <= positions[..., None]

    def layer(
        carry: tuple[Float[Array, "B T D"], KVCache], inputs: tuple[Block, Array]
    ) -> tuple[tuple[Float[Array, "B T D"], KVCache], None]:
        x, cache = carry
        p, index = inputs
        stored = cache

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal stored
            stored = KVCache(k=cache.k.at[index, rows, positions].set(k), v=cache.v.at[index, rows, positions].set(v))
            return attention(q, stored.k[index], stored.v[index], mask)

        x = block(x, p, cfg, attend)
        return (x, stored), None

    x = embed(params, tokens, positions, cfg, dtype)
    # The cache is carried, not scanned over: a scan's stacked outputs would write all of it anew for every token.
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (params.blocks, jnp.arange(cfg.layers)))
    return layer_norm(x, params.final_scale, params.final_bias), cache
