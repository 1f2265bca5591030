"""The forward pass with a key/value cache: the `block` of `gpt.py`, with an `attend` that reads and writes a cache.

A batch holds rows of different lengths: every row says where its tokens begin, they are stored from there on, and each
sees what its row holds at places up to its own. Prompts are padded on the right; what padding leaves in the cache lies
beyond the row's end and is overwritten before it can be seen. S cache positions; other letters as in `model.spec`.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from podling.config import ModelConfig
from podling.model.attention import MASKED
from podling.model.gpt import block, embed
from podling.model.ops import einsum, layer_norm
from podling.model.spec import Block, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values in the compute dtype, one array a layer.

    Positions lie last: both products of attention read the cache as it is stored, and on a TPU a head_dim of 64 is not
    padded to 128.
    """

    k: tuple[Float[Array, "B H K S"], ...]
    v: tuple[Float[Array, "B H K S"], ...]


def empty_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """A cache for `rows` rows of up to `length` positions (at most the context)."""
    shape = (rows, cfg.heads, cfg.head_dim, length)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(cfg.layers)) for _ in "kv")
    return KVCache(k, v)


def layers_apart(params: Params, cfg: ModelConfig) -> Params:
    """Parameters as `forward_cached` takes them: `blocks` is a tuple, one `Block` a layer.

    A token is multiplied with every weight once, so a weight has to be read from where it lies. A slice of stacked
    layers would be copied first, and a CPU would copy [qkv, embed, width] into another order; here q, k and v lie side
    by side, [embed, qkv x width].

    Args:
        params: arrays of one device. On a CPU what comes back shares their memory, but for the qkv kernels.
        cfg: the model.
    """
    qkv = _views(params.blocks.qkv_kernel).swapaxes(1, 2).reshape(cfg.layers, cfg.embed, -1)
    stacked: Block = jax.tree.map(_views, replace(params.blocks, qkv_kernel=qkv))
    place = params.token_embed.sharding
    blocks = (jax.tree.map(lambda leaf: leaf[index], stacked) for index in range(cfg.layers))  # noqa: B023
    return replace(params, blocks=tuple(jax.device_put(one, place) for one in blocks))


def _views(x: Any) -> Any:
    """An array whose slices are no copies, where there is one: on a CPU."""
    on_cpu = isinstance(x, jax.Array) and all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x) if on_cpu else x


def forward_cached(
    params: Params,
    tokens: Int[Array, "B T"],
    starts: Int[Array, " B"],
    cache: KVCache,
    cfg: ModelConfig,
    *,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Hidden states after the final LayerNorm, and the cache with these tokens in it.

    Prefill is a call with T prompt tokens, decoding a call with T = 1; both equal `forward` on the whole sequence.
    Runs on one device, outside a mesh.

    Args:
        params: from `layers_apart`.
        tokens: ids below `cfg.vocab_size`.
        starts: the place of each row's first token, at most S - T; every smaller place must hold a token already.
        cache: keys and values of the smaller places.
        cfg: the model.
        dtype: compute precision, the cache's.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1])[None]
    # [B, T, S]: a token sees the places up to its own.
    mask = jnp.arange(cache.k[0].shape[3])[None, None] <= positions[..., None]
    blocks: Any = params.blocks
    x, keys, values = embed(params, tokens, positions, cfg, dtype), list(cache.k), list(cache.v)
    # One layer after the other, not a scan: that would copy each layer's weights and cache out of the stack.
    for index, p in enumerate(blocks):

        def attend(q: Array, k: Array, v: Array, at: int = index) -> Array:
            keys[at], values[at] = _stored(keys[at], k, starts), _stored(values[at], v, starts)
            return _attention(q, keys[at], values[at], mask)

        x = block(x, p, cfg, attend)
    return layer_norm(x, params.final_scale, params.final_bias), KVCache(tuple(keys), tuple(values))


def _stored(
    held: Float[Array, "B H K S"], new: Float[Array, "B T H K"], starts: Int[Array, " B"]
) -> Float[Array, "B H K S"]:
    def row(held: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice(held, new, (0, 0, start))

    return jax.vmap(row)(held, jnp.moveaxis(new, 1, 3), starts)


def _attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B H K S"],
    v: Float[Array, "B H K S"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H K"]:
    """As `model.attention.attention`, over keys and values as they lie in the cache."""
    scores = einsum("bthk,bhks->bhts", q, k, out_dtype=jnp.float32) * (q.shape[-1] ** -0.5)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, MASKED), axis=-1).astype(q.dtype)
    return einsum("bhts,bhks->bthk", weights, v)
