"""What runs on the device while generating: the prefill and the decoding step, both compiled as a whole.

B rows, P padded prompt length, S cache positions; other letters as in `model.spec`. One device, outside a mesh.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from podling.config import ModelConfig
from podling.generate.sampling import Sampling, row_keys, sample
from podling.model.cache import KVCache, empty_cache, forward_cached, layers_apart
from podling.model.gpt import logits
from podling.model.spec import Params, decay_mask

NO_MESH = jax.sharding.Mesh(np.empty((), object), ())  # decoding ignores the mesh its caller may have set


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """A batch in the middle of decoding."""

    cache: KVCache
    token: Int[Array, " B"]
    """Drawn last, and not in the cache yet."""
    position: Int[Array, " B"]
    """Where that token goes in its row."""
    drawn: Int[Array, " B"]
    """Tokens drawn so far."""
    active: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """What holds for a whole call of `generate`."""

    sampling: Sampling
    seeds: Int[Array, " B"]
    limit: Int[Array, " B"]
    """Tokens each row may draw."""
    mask: Bool[Array, " V"]
    """Ids that may be drawn."""
    ends: Bool[Array, " V"]
    """Ids that end a row."""


@partial(jax.jit, static_argnames=("cfg", "cache_length", "dtype"))
def prefill(
    params: Params,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    rules: Rules,
    *,
    cfg: ModelConfig,
    cache_length: int,
    dtype: Any,
) -> DecodeState:
    """Read the prompts (padded on the right) and draw each row's first token."""
    rows = len(prompts)
    cache = empty_cache(cfg, rows, cache_length, dtype)
    hidden, cache = forward_cached(params, prompts, jnp.zeros(rows, jnp.int32), cache, cfg, dtype=dtype)
    last = hidden[jnp.arange(rows), lengths - 1][:, None]
    token = _draw(params, last, rules, jnp.zeros(rows, jnp.int32), cfg)
    drawn = jnp.ones(rows, jnp.int32)
    return DecodeState(cache, token, lengths, drawn, active=~rules.ends[token] & (drawn < rules.limit))


@partial(jax.jit, static_argnames=("cfg", "steps", "dtype"), donate_argnames=("state",))
def decode(
    params: Params, state: DecodeState, rules: Rules, *, cfg: ModelConfig, steps: int, dtype: Any
) -> tuple[DecodeState, Int[Array, "steps B"], Bool[Array, "steps B"]]:
    """Draw `steps` tokens a row: the new state, the tokens, and which of them are real (the row was active)."""

    def step(state: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, Array]]:
        hidden, cache = forward_cached(params, state.token[:, None], state.position, state.cache, cfg, dtype=dtype)
        token = jnp.where(state.active, _draw(params, hidden, rules, state.drawn, cfg), state.token)
        # A row that has ended stands still: it writes the same place again and moves nothing.
        drawn = state.drawn + state.active
        position = state.position + state.active
        active = state.active & ~rules.ends[token] & (drawn < rules.limit)
        return DecodeState(cache, token, position, drawn, active), (token, state.active)

    state, (ids, real) = jax.lax.scan(step, state, None, length=steps)
    return state, ids, real


def _draw(params: Params, hidden: Float[Array, "B 1 D"], rules: Rules, drawn: Array, cfg: ModelConfig) -> Array:
    scores = logits(params, hidden, cfg)[:, 0]
    return sample(scores, rules.sampling, rules.mask, keys=row_keys(rules.seeds, drawn))


def place(params: Params, cfg: ModelConfig, dtype: Any) -> Params:
    """The parameters on this process's first device, matrices in the compute dtype."""
    # A sharding, not a device: `device_put(x, device)` keeps the mesh axes in a sharded array's type.
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def put(leaf: Any, is_matrix: bool) -> jax.Array:
        leaf = jax.device_put(leaf, device)
        return leaf.astype(dtype) if is_matrix else leaf

    with jax.set_mesh(NO_MESH):
        return jax.tree.map(put, params, decay_mask(cfg))


def for_decoding(params: Params, cfg: ModelConfig, dtype: Any) -> Params:
    """The parameters as decoding reads them, on this process's first device; those that are come back as they are."""
    if isinstance(params.blocks, tuple):
        return params
    with jax.set_mesh(NO_MESH):
        return layers_apart(place(params, cfg, dtype), cfg)
