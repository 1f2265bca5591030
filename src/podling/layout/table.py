"""What every device of a mesh holds: each array's axes, shape, share and bytes.

The state is the traced `train.step.init_state`, so its shapes and layouts are the ones that training has; logical axes
are those of the spec tree. Activations are laid out by the same table of axes.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podling.config import Config
from podling.model.fit import padded_vocab
from podling.model.spec import param_specs
from podling.parallel.mesh import abstract_mesh, batch_sharding
from podling.train.batch_plan import BatchPlan
from podling.train.step import DeviceBatch, init_state

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MICRO_GRADIENTS = "gradients of one micro-batch"
CAST = "weights in the compute dtype"
LAYER = "one layer's weights, gathered"
ACTIVATIONS = "activations"
BATCH = "batch"
COUNTERS = "counters"
WITHIN_A_STEP = {GRADIENTS, MICRO_GRADIENTS, CAST, LAYER, ACTIVATIONS, BATCH}
MOMENTS = {"mu": "first moments (mu)", "nu": "second moments (nu)"}


@dataclass(frozen=True)
class Row:
    """One array as it lies over the mesh."""

    kind: str
    name: str
    axes: tuple[str, ...]
    """Logical axes."""
    mesh_axes: tuple[tuple[str, ...], ...]
    """For each of them, the mesh axes it is split over."""
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    """Shape on each device."""
    dtype: str
    device_bytes: int
    """Bytes on each device."""

    @property
    def rests(self) -> bool:
        """Part of the state, which lives from step to step; anything else comes and goes within one."""
        return self.kind not in WITHIN_A_STEP


def _row(kind: str, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any, sharding: Any) -> Row:
    spec = () if sharding is None else sharding.spec.partitions
    per_axis = [part if isinstance(part, tuple) else (part,) if part else () for part in spec]
    per_axis += [()] * (len(shape) - len(per_axis))
    shard = tuple(shape) if sharding is None else sharding.shard_shape(shape)
    dtype = jnp.dtype(dtype)
    return Row(
        kind=kind,
        name=name,
        axes=axes,
        mesh_axes=tuple(tuple(map(str, part)) for part in per_axis),
        shape=tuple(shape),
        shard=tuple(shard),
        dtype=dtype.name,
        device_bytes=math.prod(shard) * dtype.itemsize,
    )


def state_rows(config: Config, sizes: Mapping[str, int]) -> list[Row]:
    """Every array of the training state: parameters, moments, counters; nothing else rests between steps."""
    mesh = abstract_mesh(sizes)
    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(lambda: init_state(config))
    axes_of = {_name(path): leaf.axes for path, leaf in jax.tree_util.tree_leaves_with_path(param_specs(config.model))}
    rows: list[Row] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        whole = _name(path)
        name = next((known for known in axes_of if whole.endswith(f".{known}")), None)
        owner = whole if name is None else whole.removesuffix(f".{name}").rpartition(".")[2]
        kind = COUNTERS if name is None else PARAMETERS if owner == "params" else MOMENTS.get(owner, owner)
        axes = () if name is None else axes_of[name]
        rows.append(_row(kind, whole if name is None else name, axes, leaf.shape, leaf.dtype, leaf.sharding))
    return rows


def step_rows(config: Config, sizes: Mapping[str, int], plan: BatchPlan, dtype: Any) -> list[Row]:
    """What comes and goes within a step: gradients, a layer's weights, the batch, the activations of a micro-batch.

    With accumulation a micro-batch's gradients are there beside those they are added to; weights that are used in
    another precision are there in both (see `cost.step_bytes.bytes_per_parameter`).

    Args:
        config: resolved.
        sizes: devices on each mesh axis.
        plan: how the batch is cut.
        dtype: compute precision.
    """
    mesh, model = abstract_mesh(sizes), config.model
    parameters = [row for row in state_rows(config, sizes) if row.kind == PARAMETERS]
    kinds = (GRADIENTS, MICRO_GRADIENTS) if plan.micro_steps > 1 else (GRADIENTS,)
    rows = [dataclasses.replace(row, kind=kind) for kind in kinds for row in parameters]
    if (itemsize := jnp.dtype(dtype).itemsize) < 4:
        cast = {_name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(param_specs(model)) if leaf.cast}
        rows += [
            dataclasses.replace(
                row, kind=CAST, dtype=jnp.dtype(dtype).name, device_bytes=math.prod(row.shard) * itemsize
            )
            for row in parameters
            if row.name in cast
        ]
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_specs(model).blocks):
        held = dtype if leaf.cast else jnp.float32
        rows.append(_activation(LAYER, _name(path), leaf.axes[1:], leaf.shape[1:], held, mesh))
    for field in dataclasses.fields(DeviceBatch):
        held = jnp.float32 if field.name == "weights" else jnp.int32
        shape = (plan.micro_steps, plan.micro_batch, model.context)
        rows.append(_activation(BATCH, field.name, ("micro", "batch", "sequence"), shape, held, mesh))
    b, t, width = plan.micro_batch, model.context, model.heads * model.head_dim
    chunk = max(0, config.train.loss_chunk) or t
    for name, axes, shape, held in (
        ("residual stream", ("batch", "residual", "embed"), (b, t, model.embed), dtype),
        ("residual stream, gathered", ("batch", "sequence", "embed"), (b, t, model.embed), dtype),
        ("q, k, v", ("qkv", "batch", "sequence", "heads"), (3, b, t, width), dtype),
        ("attention scores", ("batch", "heads", "sequence", "sequence"), (b, model.heads, t, t), jnp.float32),
        ("mlp hidden", ("batch", "sequence", "mlp"), (b, t, model.mlp), dtype),
        ("logits", ("batch", "sequence", "vocab"), (b, chunk, padded_vocab(model)), jnp.float32),
    ):
        rows.append(_activation(ACTIVATIONS, name, axes, shape, held, mesh))
    return rows


def _activation(kind: str, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any, mesh: Any) -> Row:
    return _row(kind, name, axes, shape, dtype, batch_sharding(mesh, *axes))


def totals(rows: list[Row]) -> dict[str, int]:
    """Bytes on each device by kind, in the order of the rows."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.kind] = found.get(row.kind, 0) + row.device_bytes
    return found


def _name(path: Any) -> str:
    """`blocks.qkv_kernel`, `opt_state[1][0].mu.blocks.qkv_kernel`."""
    return jax.tree_util.keystr(path).removeprefix(".")
