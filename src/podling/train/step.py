"""The training step: one pure function of (state, batch), compiled once, its state donated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from podling.config import Config
from podling.model.form import Form
from podling.model.gpt import forward
from podling.model.loss import token_cross_entropy
from podling.model.spec import Params, init_params, param_specs
from podling.parallel.collectives import settle, share, zero_gradient
from podling.train.optimizer import make_optimizer
from podling.train.schedule import learning_rate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step reads and writes."""

    step: Any  # i32 []: updates made so far
    params: Params
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceBatch:
    """One optimizer step's sequences, cut into M micro-batches; scored where the weight is not zero."""

    inputs: Any  # i32 [M, B, T]
    targets: Any  # i32 [M, B, T]
    weights: Any  # f32 [M, B, T]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """What a step says about itself; read by the host one step late."""

    loss: Any  # f32 []: nats per token, mean over the step's weights
    grad_norm: Any  # f32 []: before clipping
    lr: Any  # f32 []
    finite: Any  # bool []: False means the state was left as it was


StepFunction = Callable[[TrainState, DeviceBatch], tuple[TrainState, StepMetrics]]


def init_state(config: Config) -> TrainState:
    """The state before the first step; under jit and a mesh every leaf, moments included, is born sharded."""
    params = init_params(config.model, key=jax.random.key(config.train.seed))
    optimizer = make_optimizer(config.optimizer, config.model, config.train.steps)
    return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))


def make_train_step(config: Config, dtype: Any) -> StepFunction:
    """Close the configuration over the pure step, ready for `jax.jit(..., donate_argnums=0)`.

    Args:
        config: resolved (`vocab_size`, `steps` known) and settled for the device (`podling.tuning`).
        dtype: compute precision.
    """
    optimizer = make_optimizer(config.optimizer, config.model, config.train.steps)
    schedule = learning_rate(config.optimizer, config.train.steps)

    def train_step(state: TrainState, batch: DeviceBatch) -> tuple[TrainState, StepMetrics]:
        key = dropout_key(config, state.step) if config.model.dropout > 0 else None
        nll, count, grads = sum_gradients(state.params, batch, config, dtype, key)
        loss = nll / count
        grads = jax.tree.map(lambda g: g / count, grads)
        with jax.named_scope("optimizer"):
            grad_norm = optax.tree.norm(cast(Any, grads))
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params: Any = optax.apply_updates(cast(Any, state.params), updates)
            new = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # A non-finite update never reaches the state: whatever is saved is good.
        kept = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        return kept, StepMetrics(loss=loss, grad_norm=grad_norm, lr=schedule(state.step), finite=finite)

    return train_step


def dropout_key(config: Config, step: Int[Array, ""]) -> jax.Array:
    """This step's dropout key: a function of seed and step alone, so that a resumed run drops the same activations."""
    # Initialisation folds leaf indices into the same seed; this is no leaf's index.
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(config.train.seed), 2**31 - 1), step)


def sum_gradients(
    params: Params, batch: DeviceBatch, config: Config, dtype: Any, key: jax.Array | None
) -> tuple[Float[Array, ""], Float[Array, ""], Params]:
    """Summed loss, summed weights and the gradient of the summed loss over all micro-batches.

    Sums, not means: dividing once at the end makes accumulation equal to one big batch, uneven weights included.

    While micro-batches are added up, each device keeps its own term of whatever is copied to it: the reduction over
    `data` happens once, at the end, whatever their number. Over `fsdp` each micro-batch's gradient is reduce-scattered
    as the blocks' weights are left, so no device ever holds a full one.
    """
    specs, form = param_specs(config.model), Form.of(config.train)
    params = jax.tree.map(lambda leaf, x: share(x, leaf.axes), specs, params)

    def loss(
        params: Params, inputs: Int[Array, "B T"], targets: Int[Array, "B T"], weights: Float[Array, "B T"], key: Any
    ) -> tuple[Array, tuple[Array, Array]]:
        hidden = forward(params, inputs, config.model, dtype=dtype, form=form, dropout_key=key)
        with jax.named_scope("loss"):
            chunk = form.loss_chunk
            total, nll = token_cross_entropy(params, hidden, targets, weights, config.model, chunk=chunk)
        # The sum over devices is for the gradient alone; what is read is [B].
        return total, (jnp.sum(nll, axis=-1), jnp.sum(weights, axis=-1))

    gradient = jax.grad(loss, has_aux=True)

    def add_micro_batch(total: Any, piece: tuple[Array, DeviceBatch]) -> tuple[Any, None]:
        index, micro = piece
        micro_key = None if key is None else jax.random.fold_in(key, index)
        grads, (nll, count) = gradient(params, micro.inputs, micro.targets, micro.weights, micro_key)
        return jax.tree.map(jnp.add, total, (nll, count, grads)), None

    rows = jnp.zeros_like(batch.weights[0, :, 0])
    zero = (rows, rows, jax.tree.map(lambda leaf, x: zero_gradient(x, leaf.axes), specs, params))
    micro_steps = batch.inputs.shape[0]
    if micro_steps == 1:  # no loop, and no pass over zeros
        total, _ = add_micro_batch(zero, (jnp.int32(0), jax.tree.map(lambda x: x[0], batch)))
    else:
        total, _ = jax.lax.scan(add_micro_batch, zero, (jnp.arange(micro_steps), batch))
    nll, count, grads = total
    return jnp.sum(nll), jnp.sum(count), jax.tree.map(lambda leaf, g: settle(g, leaf.axes), specs, grads)
