"""One table from logical array axes to mesh axes.

Model code names what an axis *is* ("embed", "heads"); this table says where it lies. Storage is how parameters,
gradients and moments rest between steps; compute is what parameters are gathered to, and how activations lie, inside a
block. `parallel/collectives.py` moves arrays between the two.
"""

import jax
from jax.sharding import PartitionSpec

STORAGE: dict[str, str | None] = {
    "layers": None,
    "qkv": None,
    "norm": None,  # vectors as long as embed: too small to be worth a gather
    "embed": "fsdp",
    "position": "tensor",
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
}
COMPUTE: dict[str, str | tuple[str, ...] | None] = {
    **STORAGE,
    "embed": None,
    "micro": None,
    "batch": ("data", "fsdp"),
    "sequence": None,  # inside attention, MLP and loss, which split heads, mlp and vocab
    "residual": "tensor",  # the sequence axis of the residual stream, between them
}


def has_layout() -> bool:
    """Whether arrays lie over a mesh here: neither without one, nor inside `shard_map` or `pmap`.

    There the axes are manual, an array is what one device holds, and the very same model code computes on that.
    """
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


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
