"""Next-token cross-entropy in float32, as a sum and a count that are divided once, at the very end."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podling.config import ModelConfig
from podling.model.gpt import head
from podling.model.spec import Params, compute_params, param_specs


def cross_entropy(
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    cfg: ModelConfig,
    *,
    chunk: int = 0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted sum of -log p(target) in nats, and the sum of the weights.

    Args:
        params: float32, as stored; only the tied head is used.
        hidden: final hidden states in the compute dtype.
        targets: the token that follows each position.
        weights: 0 where a position is padding, otherwise its weight.
        cfg: sizes.
        chunk: positions scored at a time (0: all). At V = 50k the float32 logits of one 1024-token row take 0.2 GB,
            doubled by their gradient; chunks are recomputed in the backward pass, so only one ever exists.
    """
    # Gathered once, outside the chunks, so that their gradients meet in one buffer.
    table = compute_params(params.token_embed, param_specs(cfg).token_embed, hidden.dtype)
    length = targets.shape[1]
    if chunk in (0, length):
        return _nll_sum(table, hidden, targets, weights, cfg), jnp.sum(weights)

    def split(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, chunk, ...]
        return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def add_chunk(total: Array, piece: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + _nll_sum(table, *piece, cfg), None

    total, _ = jax.lax.scan(add_chunk, jnp.float32(0.0), (split(hidden), split(targets), split(weights)))
    return total, jnp.sum(weights)


def _nll_sum(table: Array, hidden: Array, targets: Array, weights: Array, cfg: ModelConfig) -> Float[Array, ""]:
    scores = head(table, hidden, cfg)
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2, out_sharding=jax.typeof(scores).sharding)
    # A comparison and a sum rather than an index: it stays local when the vocabulary is sharded.
    target_score = jnp.sum(jnp.where(column == targets[..., None], scores, 0.0), axis=-1)
    return jnp.sum((jax.nn.logsumexp(scores, axis=-1) - target_score) * weights)
