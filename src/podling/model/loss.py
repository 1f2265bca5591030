"""Next-token cross-entropy in float32, as a sum and a count that are divided once, at the very end.

Its gradient is found in the forward pass, chunk by chunk: while a chunk's logits are there, their gradient is one
subtraction away, so they are neither kept nor computed a second time for the backward pass.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podling.config import ModelConfig
from podling.model.gpt import head
from podling.model.ops import einsum
from podling.model.spec import Params, compute_params, param_specs
from podling.parallel.collectives import enter, gradient_spec, scaled


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
            doubled by their gradient; with chunks only those of one chunk ever exist.
    """
    return token_cross_entropy(params, hidden, targets, weights, cfg, chunk=chunk)[0], jnp.sum(weights)


def token_cross_entropy(
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    cfg: ModelConfig,
    *,
    chunk: int = 0,
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """`cross_entropy`'s sum, which has a gradient, and its terms, which have none: sum them where they lie."""
    # Gathered once, outside the chunks, so that their gradients meet in one buffer.
    table = compute_params(params.token_embed, param_specs(cfg).token_embed, hidden.dtype)
    return _summed(table, enter(hidden), targets, weights, cfg, chunk or targets.shape[1])


Pieces = tuple[Array, Array, Array]
"""Hidden states, targets and weights."""


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(
    table: Array, hidden: Array, targets: Array, weights: Array, cfg: ModelConfig, chunk: int
) -> tuple[Array, Array]:
    def score(carry: None, piece: Pieces) -> tuple[None, Array]:
        hidden, targets, weights = piece
        _, normaliser, target_score, _is_target = _scores(table, hidden, targets, cfg)
        return carry, (normaliser - target_score) * weights

    _, nll = _over_chunks(score, None, (hidden, targets, weights), chunk, weights)
    return jnp.sum(nll), nll


def _summed_forward(
    table: Array, hidden: Array, targets: Array, weights: Array, cfg: ModelConfig, chunk: int
) -> tuple[tuple[Array, Array], Any]:
    def differentiate(of_table: Array, piece: Pieces) -> tuple[Array, tuple[Array, Array]]:
        hidden, targets, weights = piece
        scores, normaliser, target_score, is_target = _scores(table, hidden, targets, cfg)
        softmax = jnp.exp(scores - normaliser[..., None])
        of_scores = ((softmax - is_target) * weights[..., None]).astype(hidden.dtype)
        of_hidden = einsum("btv,vd->btd", of_scores, table, out_spec=gradient_spec(hidden))
        out = gradient_spec(table)
        of_table = of_table + einsum("btv,btd->vd", of_scores, hidden, out_spec=out, out_dtype=jnp.float32)
        return of_table, (normaliser - target_score, of_hidden)

    zero = jnp.zeros(table.shape, jnp.float32, out_sharding=gradient_spec(table))
    of_table, (nll, of_hidden) = _over_chunks(differentiate, zero, (hidden, targets, weights), chunk, (weights, hidden))
    weighted = nll * weights
    return (jnp.sum(weighted), weighted), (of_table, of_hidden, nll)


def _summed_backward(cfg: ModelConfig, chunk: int, kept: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    of_table, of_hidden, nll = kept
    of_table = scaled(of_table, grads[0]).astype(of_hidden.dtype)
    return of_table, scaled(of_hidden, grads[0]), None, nll * grads[0]


_summed.defvjp(_summed_forward, _summed_backward)


def _scores(table: Array, hidden: Array, targets: Array, cfg: ModelConfig) -> tuple[Array, Array, Array, Array]:
    """Of each position: all scores, the logarithm of their summed exponentials, the target's, and which that is."""
    scores = head(table, hidden, cfg)
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2, out_sharding=jax.typeof(scores).sharding)
    # A comparison and a sum rather than an index: it stays local when the vocabulary is sharded.
    is_target = column == targets[..., None]
    target_score = jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    return scores, jax.nn.logsumexp(scores, axis=-1), target_score, is_target


def _over_chunks(body: Any, carry: Any, pieces: Pieces, chunk: int, like: Any) -> tuple[Any, Any]:
    """`lax.scan` over pieces of `chunk` positions.

    Args:
        body: (carry, pieces of `chunk` positions) -> (carry, results of these positions).
        carry: its first.
        pieces: of all positions.
        chunk: divides their number.
        like: arrays of all positions, of which the joined results are gradients by type.
    """
    length = pieces[1].shape[1]
    if chunk == length:
        return body(carry, pieces)

    def split(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, chunk, ...]
        return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

    carry, found = jax.lax.scan(body, carry, jax.tree.map(split, pieces))
    return carry, jax.tree.map(lambda whole, parts: jax.vjp(split, whole)[1](parts)[0], like, found)
