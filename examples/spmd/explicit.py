"""Data parallelism as an explicit mesh has it: the program of one device, on global arrays that know where they lie.

How an array is cut is part of its type, so the function is written as if there were one device, no collective in it.
This is how podling trains: more axes of the mesh shard the parameters too, and the step stays as it is.
"""

from typing import Any

import jax
import optax
import shared
from jax import P
from jax.sharding import AxisType


@jax.jit
def step(params: Any, opt_state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
    """What happens to the parameters and the whole batch, wherever they lie."""
    loss, grads = jax.value_and_grad(shared.loss)(params, inputs, targets)
    # The loss is a mean over all rows: the compiler averages over devices because that is what the mean means.
    updates, opt_state = shared.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(steps: int) -> tuple[Any, list[float]]:
    """Trained parameters, one global array each, and the loss of every step."""
    # podling's model knows these three axes; here the last two have size 1.
    sizes, losses = (jax.device_count(), 1, 1), []
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        params = jax.jit(shared.init)()
        opt_state = jax.jit(shared.optimizer.init)(params)
        for number in range(steps):
            inputs, targets = jax.device_put(shared.batch(number), jax.NamedSharding(mesh, P(("data", "fsdp"))))
            params, opt_state, loss = step(params, opt_state, inputs, targets)
            losses.append(float(loss))
    return params, losses


if __name__ == "__main__":
    shared.main(train)
