"""Loss and gradient norm of each example, by `vmap` of the gradient of one window.

A document's loss is the mean over its tokens, and its gradient norm that of the gradient of this mean: how hard the
document would pull at the parameters if a step were taken on it alone.
"""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from podling.config import ModelConfig
from podling.model.gpt import forward
from podling.model.loss import cross_entropy
from podling.model.spec import Params


def loss_and_grad(
    params: Params,
    inputs: Int[Array, " T"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    cfg: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    loss_chunk: int = 0,
) -> tuple[Float[Array, ""], Params]:
    """Summed loss of a single example, in nats, and its gradient; one call knows nothing of other examples."""

    def loss(params: Params) -> Float[Array, ""]:
        hidden = forward(params, inputs[None], cfg, dtype=dtype)
        return cross_entropy(params, hidden, targets[None], weights[None], cfg, chunk=loss_chunk)[0]

    return jax.value_and_grad(loss)(params)


def score_windows(
    params: Params,
    running: Params,
    begins: Bool[Array, " B"],
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    cfg: ModelConfig,
    **how: Any,
) -> tuple[Params, Float[Array, " B"], Float[Array, " B"]]:
    """Loss of each window, and the norm of its document's gradient as far as that window.

    B gradients exist at once, so B is a handful, and a long text goes through in many calls.

    Args:
        params: float32, as stored.
        running: summed gradient of the document that the call before this one left unfinished.
        begins: where a window is the first of its document.
        inputs: windows in reading order; those of a document follow one another.
        targets: the token after each.
        weights: 0 on padding.
        cfg: sizes.
        how: dtype and loss_chunk, as `loss_and_grad` takes them.

    Returns:
        The new `running`, summed losses in nats, and norms of the gradient of the summed loss.
    """
    one = partial(loss_and_grad, cfg=cfg, **how)
    losses, grads = jax.vmap(one, in_axes=(None, 0, 0, 0))(params, inputs, targets, weights)

    def add(total: Params, piece: tuple[Array, Params]) -> tuple[Params, Array]:
        begin, grad = piece
        total = jax.tree.map(lambda sum_, g: jnp.where(begin, 0.0, sum_) + g, total, grad)
        return total, optax.tree.norm(cast(Any, total))

    running, norms = lax.scan(add, running, (begins, grads))
    return running, losses, norms
