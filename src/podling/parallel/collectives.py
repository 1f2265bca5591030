"""Every way in which a training step moves data between devices; model code names no mesh axis.

Two marks in an array's type, `PartitionSpec(..., reduced={...}, unreduced={...})`, say what will travel and when:

- *reduced* over an axis: its devices hold the same values, and their gradients may stay apart, one term a device.
- *unreduced* over an axis: each device holds one term of a sum that is still to be taken.

A parameter is reduced over every axis it is copied along, so that its gradient is a sum taken once, after all
micro-batches. Where arrays have no layout (`has_layout`), and over an axis of one device, nothing here moves anything.

Gathering weights where they are used is ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3); the
residual stream split along its sequence is Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Set
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from podling.parallel.rules import COMPUTE, STORAGE, activation_spec, compute_spec, has_layout, storage_spec

SUMMED = "summed"


def live(axis: str | None) -> bool:
    """True when arrays here may be split over this mesh axis: it has more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return axis in mesh.explicit_axes and mesh.shape[axis] > 1


def platform() -> str:
    """What a program is traced for: the platform of the ambient mesh, whose devices need not be here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def copied_over(axes: tuple[str, ...]) -> set[str]:
    """The mesh axes along which a stored parameter with these logical axes is copied."""
    split = {STORAGE[axis] for axis in axes}  # axes of one device are named like any other
    return set(jax.sharding.get_abstract_mesh().explicit_axes) - split


def share(x: Array, axes: tuple[str, ...]) -> Array:
    """Mark a stored parameter as reduced over the axes it is copied along."""
    copied = copied_over(axes)
    return jax.sharding.reshard(x, _marked(storage_spec(axes), reduced=copied)) if copied else x


def zero_gradient(x: Array, axes: tuple[str, ...]) -> Array:
    """Zeros in the type of this parameter's gradient before `settle`."""
    spec = _marked(storage_spec(axes), unreduced=copied_over(axes)) if has_layout() else None
    return jnp.zeros(x.shape, x.dtype, out_sharding=spec)


def gradient_spec(x: Array) -> PartitionSpec | None:
    """Layout of x's gradient: what x is reduced over, that is unreduced over; None where arrays have no layout."""
    spec = jax.typeof(x).sharding.spec
    return _marked(spec, unreduced=spec.reduced) if has_layout() else None


def scaled(x: Array, by: Float[Array, ""]) -> Array:
    """x, of which devices may each hold one term, times a number that all of them hold."""
    terms = jax.typeof(x).sharding.spec.unreduced
    by = jax.sharding.reshard(by, _marked(PartitionSpec(), reduced=terms)) if terms else by
    return x * by.astype(x.dtype)


def settle(gradient: Array, axes: tuple[str, ...]) -> Array:
    """Take the sum that a gradient still lacks: an all-reduce over the axes along which the parameter is copied."""
    return jax.sharding.reshard(gradient, storage_spec(axes)) if copied_over(axes) else gradient


def gather(x: Array, axes: tuple[str, ...]) -> Array:
    """Bring a stored parameter to its compute layout: an all-gather over fsdp, its transpose a reduce-scatter."""
    x = share(x, axes)
    split = [(dim, STORAGE[axis]) for dim, axis in enumerate(axes) if STORAGE[axis] != COMPUTE[axis]]
    if not split or not has_layout():
        return x
    [(dim, over)] = split  # the table splits no parameter over fsdp twice
    copied = copied_over(axes)
    gathered = _marked(activation_spec(axes), reduced=copied | {str(over)})
    if not live(over):
        return jax.sharding.reshard(x, gathered)
    return jax.shard_map(
        partial(jax.lax.all_gather, axis_name=over, axis=dim, tiled=True, to="reduced"),
        in_specs=_marked(storage_spec(axes), reduced=copied),
        out_specs=gathered,
    )(x)


def spread(vector: Array, like: Array, dims: tuple[int, ...] = (-1,)) -> Array:
    """Repeat a small parameter over the other axes of `like`, each device for its part; the transpose sums there.

    Args:
        vector: in its compute layout.
        like: gives shape and layout.
        dims: the axes of `like` that are the vector's own.
    """
    dims = tuple(dim % like.ndim for dim in dims)
    spec = jax.typeof(like).sharding.spec if has_layout() else None
    return jax.lax.broadcast_in_dim(vector, like.shape, dims, out_sharding=spec)


def enter(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream as attention, MLP and loss read it: every position, an all-gather over tensor."""
    if not live("tensor"):
        return _retyped(x, activation_spec(("batch", "sequence", "embed")))
    return jax.shard_map(
        lambda x: jax.lax.all_gather(x, "tensor", axis=1, tiled=True, to="reduced"),
        in_specs=activation_spec(("batch", "residual", "embed")),
        out_specs=_marked(activation_spec(("batch", "sequence", "embed")), reduced={"tensor"}),
    )(x)


def summand_spec() -> PartitionSpec | None:
    """Type of what a product over heads or mlp adds to the residual stream: one term on each device of tensor."""
    spec = compute_spec("batch", "sequence", "embed")
    return _marked(spec, unreduced={"tensor"}) if spec is not None and live("tensor") else spec


def leave(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Sum the terms of `summand_spec` and return to the residual stream's layout: a reduce-scatter over tensor.

    The result is named `SUMMED` for remat policies: it can be kept for the backward pass, the terms cannot.
    """
    if not live("tensor"):
        return _retyped(x, activation_spec(("batch", "residual", "embed")))
    summed = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True),
        in_specs=summand_spec(),
        out_specs=activation_spec(("batch", "residual", "embed")),
    )(x)
    return checkpoint_name(summed, SUMMED)


def look_up(table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
    """Rows of a table split over tensor (rows) and fsdp (columns), in the residual stream's layout.

    The table stays where it is. Each device looks up its columns for the rows of its whole fsdp group, those of other
    devices' vocabulary as zeros; a reduce-scatter over tensor adds them up, and an all-to-all over fsdp gives each
    device all columns of its own rows. The gradient goes the same way back.

    Args:
        table: float32, as stored.
        tokens: ids below V.
        dtype: of the result, and of what travels; rows are added up in the table's own precision by the transpose.
    """
    if not (live("tensor") or live("fsdp")):
        spec = compute_spec("batch", "residual", "embed")
        return table.at[tokens].get(out_sharding=spec).astype(dtype)

    def local(table: Array, ids: Array) -> Array:
        if live_here["fsdp"]:
            ids = jax.lax.all_gather(ids, "fsdp", axis=0, tiled=True)
        if not live_here["tensor"]:
            x = table[ids].astype(dtype)
        else:
            ids = ids - jax.lax.axis_index("tensor") * table.shape[0]
            ours = (ids >= 0) & (ids < table.shape[0])
            x = table.at[jnp.where(ours, ids, table.shape[0])].get(mode="fill", fill_value=0).astype(dtype)
            x = jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        return jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=2, tiled=True) if live_here["fsdp"] else x

    live_here = {axis: live(axis) for axis in ("fsdp", "tensor")}  # inside shard_map the axes are manual
    axes = ("vocab", "embed")
    return jax.shard_map(
        local,
        in_specs=(_marked(storage_spec(axes), reduced=copied_over(axes)), activation_spec(("batch", "sequence"))),
        out_specs=activation_spec(("batch", "residual", "embed")),
    )(share(table, axes), tokens)


def _retyped(x: Array, spec: PartitionSpec) -> Array:
    """The same array where axes of one device are named otherwise; nothing moves."""
    return jax.sharding.reshard(x, spec) if has_layout() else x


def _marked(
    spec: PartitionSpec, *, reduced: Set[str] = frozenset(), unreduced: Set[str] = frozenset()
) -> PartitionSpec:
    return PartitionSpec(*spec.partitions, reduced=frozenset(reduced), unreduced=frozenset(unreduced))
