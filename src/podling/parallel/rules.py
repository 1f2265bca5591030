"""One table from logical array axes to mesh axes.

Model code names what an axis *is* ("embed", "heads"); this table says where it lies. Storage is how parameters and
moments rest between steps; compute is what they are gathered to, and how activations lie, inside a block.
"""

import jax
from jax.sharding import AxisType, PartitionSpec

STORAGE: dict[str, str | None] = {
    "layers": None,
    "qkv": None,
    "position": None,
    "norm": None,  # vectors as long as embed: too small to be worth a gather
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
}
COMPUTE: dict[str, str | tuple[str, ...] | None] = {
    **STORAGE,
    "embed": None,
    "micro": None,
    "batch": ("data", "fsdp"),
    "sequence": None,
}


def has_layout() -> bool:
    """Whether arrays lie over a mesh here: neither without one, nor inside `shard_map` or `pmap`.

    There the axes are manual, an array is what one device holds, and the very same model code computes on that.
    """
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def storage_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Where an array with these logical axes rests between steps."""
    return PartitionSpec(*(STORAGE[axis] for axis in axes))


def stored_spec(axes: tuple[str, ...]) -> PartitionSpec | None:
    """`storage_spec`, or None where there is no choice to make (see `has_layout`)."""
    return storage_spec(axes) if has_layout() else None


def activation_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Where an array with these logical axes lies inside a block."""
    return PartitionSpec(*(COMPUTE[axis] for axis in axes))


def compute_spec(*axes: str) -> PartitionSpec | None:
    """`activation_spec`, or None where there is no choice to make (see `has_layout`)."""
    return activation_spec(axes) if has_layout() else None


def gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Bring a stored parameter to its compute layout: an all-gather over fsdp, whose transpose is a reduce-scatter."""
    spec = compute_spec(*axes)
    return x if spec is None else jax.sharding.reshard(x, spec)
