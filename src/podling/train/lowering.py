"""The training step ahead of time: traced and lowered for a mesh from shapes alone, with no array and no device.

Training, planning and explaining all compile what comes from here, so that none of them describes the step anew.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podling.config import Config
from podling.parallel.mesh import batch_sharding
from podling.startup import keep_memory
from podling.train.batch_plan import machine_memory_bytes
from podling.train.step import DeviceBatch, TrainState, init_state, make_train_step
from podling.tuning import settled


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without any of its bytes.

    Args:
        config: resolved (`vocab_size` known).
        mesh: of devices that may not be there; the ambient one (`jax.set_mesh`).
    """

    def on_mesh(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, jax.eval_shape(lambda: init_state(config)))


def initial_state(config: Config, mesh: Mesh) -> TrainState:
    """The state at step 0 on this process's devices, every leaf born where it is stored.

    Args:
        config: resolved (`vocab_size` known).
        mesh: the ambient one, of real devices.
    """
    # It runs once: on a CPU, better code takes 1.5 s more to compile and runs no faster. The values are the same.
    quick = {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None
    return jax.jit(init_state, static_argnums=0, compiler_options=quick)(config)


def abstract_batch(config: Config, mesh: Mesh, micro_batch: int, micro_steps: int) -> DeviceBatch:
    """The arguments' types of one step: [micro_steps, micro_batch, context] sequences over the mesh."""
    sharding = batch_sharding(mesh, "micro", "batch", "sequence")
    shape = (micro_steps, micro_batch, config.model.context)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return DeviceBatch(tokens, tokens, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


def compiled_here(lowered: Any, mesh: Mesh) -> jax.stages.Compiled:
    """Compile the step for this process's devices; on CPUs, the memory that it takes is kept from one to the next."""
    compiled = lowered.compile()
    found = compiled.memory_analysis()
    if found is not None and mesh.devices.flat[0].platform == "cpu":
        keep_memory(found.temp_size_in_bytes * len(mesh.local_devices), machine_memory_bytes())
    return compiled


def lower_step(
    config: Config,
    mesh: Mesh,
    dtype: Any,
    micro_batch: int,
    micro_steps: int,
    wrap: Callable[[Any], Any] = lambda step: step,
) -> Any:
    """The step as `jax.jit(...).lower(...)` gives it, its state donated.

    Args:
        config: resolved (`vocab_size`, `steps` known); what it leaves open is settled for the mesh's devices.
        mesh: the ambient one; of real devices or of a topology's.
        dtype: compute precision.
        micro_batch: rows of one forward pass, over all devices.
        micro_steps: forward passes in a step.
        wrap: put around the step before it is traced.
    """
    device = mesh.devices.flat[0]
    config = settled(config, device.platform, device.device_kind)
    step = jax.jit(wrap(make_train_step(config, dtype)), donate_argnums=0)
    return step.lower(abstract_state(config, mesh), abstract_batch(config, mesh, micro_batch, micro_steps))
