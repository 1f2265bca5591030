"""Data parallelism as `jax.pmap` taught it: one function run once per device, on arrays with a leading device axis.

Still worth reading, no longer worth writing: since JAX 0.8 pmap is only kept working (it is built on `shard_map`, and
gives no warning), and it refuses to run under `jax.set_mesh`, because it makes a mesh of its own. See docs/spmd.md.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import shared
from jax import lax


@partial(jax.pmap, axis_name="devices")
def step(params: Any, opt_state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
    """What each device does with its copy of the parameters and its own rows."""
    loss, grads = jax.value_and_grad(shared.loss)(params, inputs, targets)
    loss, grads = lax.pmean((loss, grads), "devices")
    updates, opt_state = shared.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(steps: int) -> tuple[Any, list[float]]:
    """Trained parameters, one copy of them, and the loss of every step."""
    devices, losses = jax.device_count(), []
    params = shared.init()
    params, opt_state = replicate((params, shared.optimizer.init(params)))
    for number in range(steps):
        inputs, targets = (x.reshape(devices, -1, x.shape[-1]) for x in shared.batch(number))
        params, opt_state, loss = step(params, opt_state, inputs, targets)
        losses.append(float(loss[0]))
    return jax.tree.map(lambda x: x[0], params), losses


def replicate(tree: Any) -> Any:
    """Each leaf once per device, stacked: slice i lies on device i (once `jax.device_put_replicated`)."""
    mesh = jax.sharding.Mesh(jax.devices(), "devices")
    one_each = jax.NamedSharding(mesh, jax.P("devices"))
    return jax.tree.map(lambda x: jax.device_put(np.broadcast_to(x, (mesh.size, *x.shape)), one_each), tree)


if __name__ == "__main__":
    shared.main(train)
