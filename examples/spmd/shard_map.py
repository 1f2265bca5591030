"""Data parallelism as `jax.shard_map` writes it: the same function per device, on slices of global arrays.

What pmap said by shapes is said by names here: `P("data")` cuts an array's first axis over the devices, `P()` gives
every device the whole of it. The collective is still ours to write.
"""

from typing import Any

import jax
import optax
import shared
from jax import P, lax


def step(params: Any, opt_state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
    """What each device does with the parameters and its own rows."""
    # The type knows that `params` is one value on all devices, and then the gradient is summed over them by itself.
    # A device's own gradient, for us to average, is that of parameters said to be its own.
    mine = lax.pcast(params, "data", to="varying")
    loss, grads = jax.value_and_grad(shared.loss)(mine, inputs, targets)
    loss, grads = lax.pmean((loss, grads), "data")
    updates, opt_state = shared.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(steps: int) -> tuple[Any, list[float]]:
    """Trained parameters, one global array each, and the loss of every step."""
    mesh, losses = jax.make_mesh((jax.device_count(),), ("data",)), []
    in_specs, out_specs = (P(), P(), P("data"), P("data")), (P(), P(), P())
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    params = shared.init()
    params, opt_state = jax.device_put((params, shared.optimizer.init(params)), jax.NamedSharding(mesh, P()))
    for number in range(steps):
        inputs, targets = jax.device_put(shared.batch(number), jax.NamedSharding(mesh, P("data")))
        params, opt_state, loss = mapped(params, opt_state, inputs, targets)
        losses.append(float(loss))
    return params, losses


if __name__ == "__main__":
    shared.main(train)
