"""Next-token cross-entropy in float32, as a sum and a count that are divided once, at the very end."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podling.config import ModelConfig
from podling.model.gpt import head
from podling.model.spec import Params, compute_params, param_specs
from podling.parallel.collectives import enter


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
    nll, count = sequence_cross_entropy(params, hidden, targets, weights, cfg, chunk=chunk)
    return jnp.sum(nll), jnp.sum(count)


def sequence_cross_entropy(
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    cfg: ModelConfig,
    *,
    chunk: int = 0,
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """`cross_entropy` of each sequence; sums over the batch, which lies on many devices, are left to the caller."""
    # Gathered once, outside the chunks, so that their gradients meet in one buffer.
    table = compute_params(params.token_embed, param_specs(cfg).token_embed, hidden.dtype)
    hidden, count = enter(hidden), jnp.sum(weights, axis=-1)
    length = targets.shape[1]
    if chunk in (0, length):
        return _nll(table, hidden, targets, weights, cfg), count

    def split(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, chunk, ...]
        return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def add_chunk(total: Array, piece: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + _nll(table, *piece, cfg), None

    nll, _ = jax.lax.scan(add_chunk, jnp.zeros_like(count), (split(hidden), split(targets), split(weights)))
    return nll, count


def _nll(table: Array, hidden: Array, targets: Array, weights: Array, cfg: ModelConfig) -> Float[Array, " B"]:
    scores = head(table, hidden, cfg)
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2, out_sharding=jax.typeof(scores).sharding)
    # A comparison and a sum rather than an index: it stays local when the vocabulary is sharded.
    target_score = jnp.sum(jnp.where(column == targets[..., None], scores, 0.0), axis=-1)
    return jnp.sum((jax.nn.logsumexp(scores, axis=-1) - target_score) * weights, axis=-1)
