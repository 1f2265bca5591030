"""The one place where a parameter's shape, logical axes, initialisation and weight decay are written.

Axis glossary, used in every annotation of this package:

    B batch   T sequence   D embed   N heads x head_dim   H heads   K head_dim   F mlp   V vocabulary   L layers

`param_specs` gives the tree; initial values, shardings, decay mask and checkpoint templates all derive from it.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podling.config import ModelConfig
from podling.model.fit import padded_vocab
from podling.parallel.collectives import gather
from podling.parallel.mesh import storage_sharding
from podling.parallel.rules import stored_spec

INIT_STD = 0.02


@dataclass(frozen=True)
class Leaf:
    """What a parameter is before it has values."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: float | str  # standard deviation of a normal, or "zeros" or "ones"
    decay: bool  # AdamW decays it
    cast: bool = True  # used in the compute dtype; vectors stay float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """The transformer blocks, each leaf stacked over layers on its first axis. `Any`: arrays, specs or shardings."""

    ln1_scale: Any
    ln1_bias: Any
    qkv_kernel: Any
    qkv_bias: Any
    out_kernel: Any
    out_bias: Any
    ln2_scale: Any
    ln2_bias: Any
    up_kernel: Any
    up_bias: Any
    down_kernel: Any
    down_bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """All parameters of a GPT-2; the head is the token embedding."""

    token_embed: Any
    pos_embed: Any
    blocks: Block
    final_scale: Any
    final_bias: Any


def param_specs(cfg: ModelConfig) -> Params:
    """The tree of `Leaf` of a GPT-2.

    Initial values as in Radford et al. 2019, section 2.3: normals of 0.02, with the two projections into the residual
    stream scaled by 1/sqrt(2 x layers).
    """
    layers, embed, mlp, width = cfg.layers, cfg.embed, cfg.mlp, cfg.heads * cfg.head_dim
    residual_std = INIT_STD / math.sqrt(2 * layers)

    def bias(size: int, axis: str) -> Leaf:
        return Leaf((layers, size), ("layers", axis), "zeros", decay=False, cast=False)

    def norm(init: str) -> Leaf:
        return Leaf((layers, embed), ("layers", "norm"), init, decay=False, cast=False)

    blocks = Block(
        ln1_scale=norm("ones"),
        ln1_bias=norm("zeros"),
        qkv_kernel=Leaf((layers, 3, embed, width), ("layers", "qkv", "embed", "heads"), INIT_STD, decay=True),
        qkv_bias=Leaf((layers, 3, width), ("layers", "qkv", "heads"), "zeros", decay=False, cast=False),
        out_kernel=Leaf((layers, width, embed), ("layers", "heads", "embed"), residual_std, decay=True),
        out_bias=bias(embed, "norm"),
        ln2_scale=norm("ones"),
        ln2_bias=norm("zeros"),
        up_kernel=Leaf((layers, embed, mlp), ("layers", "embed", "mlp"), INIT_STD, decay=True),
        up_bias=bias(mlp, "mlp"),
        down_kernel=Leaf((layers, mlp, embed), ("layers", "mlp", "embed"), residual_std, decay=True),
        down_bias=bias(embed, "norm"),
    )
    return Params(
        token_embed=Leaf((padded_vocab(cfg), embed), ("vocab", "embed"), INIT_STD, decay=True),
        pos_embed=Leaf((cfg.context, embed), ("position", "embed"), INIT_STD, decay=True),
        blocks=blocks,
        final_scale=Leaf((embed,), ("norm",), "ones", decay=False, cast=False),
        final_bias=Leaf((embed,), ("norm",), "zeros", decay=False, cast=False),
    )


def init_params(cfg: ModelConfig, *, key: jax.Array) -> Params:
    """Initial float32 values, each leaf made where it is stored: no device ever holds more than its share.

    Every leaf has its own key, so that its values depend neither on the mesh nor on the other leaves.
    """
    leaves, tree = jax.tree.flatten(param_specs(cfg))
    params = tree.unflatten(_init_leaf(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(leaves))
    real_rows = jnp.arange(padded_vocab(cfg))[:, None] < cfg.vocab_size
    # Padding rows start at zero and stay there: their logits are masked, so they get no gradient.
    return dataclasses.replace(params, token_embed=jnp.where(real_rows, params.token_embed, 0.0))


def _init_leaf(leaf: Leaf, key: jax.Array) -> jax.Array:
    spec = stored_spec(leaf.axes)
    if isinstance(leaf.init, str):
        return jnp.full(leaf.shape, {"zeros": 0.0, "ones": 1.0}[leaf.init], jnp.float32, out_sharding=spec)
    return leaf.init * jax.random.normal(key, leaf.shape, jnp.float32, out_sharding=spec)


def abstract_params(cfg: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """The tree of float32 `ShapeDtypeStruct`, with each leaf's storage sharding when a mesh is given."""

    def struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else storage_sharding(mesh, leaf.axes)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)

    return jax.tree.map(struct, param_specs(cfg))


def compute_params(stored: Any, specs: Any, dtype: Any) -> Any:
    """Stored parameters as a block uses them: cast to the compute dtype, then gathered (so fewer bytes travel).

    Args:
        stored: float32 arrays; one with an axis less than its spec is one layer's slice.
        specs: the matching tree of `Leaf`.
        dtype: compute precision.
    """

    def ready(x: jax.Array, leaf: Leaf) -> jax.Array:
        return gather(x.astype(dtype) if leaf.cast else x, leaf.axes[len(leaf.axes) - x.ndim :])

    return jax.tree.map(ready, stored, specs)


def decay_mask(cfg: ModelConfig) -> Params:
    """True where weight decay applies: matrices and embeddings, not biases or LayerNorm."""
    return jax.tree.map(lambda leaf: leaf.decay, param_specs(cfg))


def param_count(cfg: ModelConfig) -> int:
    """Parameters of the model as published: padding rows are not counted."""
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_specs(cfg)))
    return total - (padded_vocab(cfg) - cfg.vocab_size) * cfg.embed
