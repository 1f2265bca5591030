"""What the backward pass keeps of a block, and what it computes or gathers again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from podling.parallel.collectives import SUMMED

STATISTICS = "statistics"
"""Name of a LayerNorm's two numbers a row."""
ATTENDED = "attended"
"""Name of what an attention kernel gives its own backward pass: its output, and the log of each softmax's sum."""

_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_named = jax.checkpoint_policies.save_only_these_names(SUMMED, STATISTICS, ATTENDED)


def rematerialised(layer: Callable[..., Any], remat: str, *, in_loop: bool = True) -> Callable[..., Any]:
    """The same function, its backward pass recomputing what `remat` says.

    Whatever is kept, gathered weights and sequences are not: kept over a scan they would add up to whole copies of what
    the mesh splits. They are gathered again.

    Args:
        layer: one layer.
        remat: `none` keeps every result, `dots` those of matrix products, `full` only the layer's input.
        in_loop: whether the layer is the body of a scan over layers.
    """
    # Inside a loop there is nothing that common-subexpression elimination could merge with; with layers one after
    # another it would find that what is computed again has been computed before, and keep that.
    checkpoint = partial(jax.checkpoint, layer, prevent_cse=not in_loop and remat != "none")
    if remat == "full":
        return checkpoint()
    if remat == "dots":
        return checkpoint(policy=keep_products)
    return checkpoint(policy=keep_all_but_gathered)


def keep_products(prim: Any, *args: Any, **params: Any) -> bool:
    """Keep matrix products and what attention kernels name; where each device computed one term of a sum, the sum."""
    out = params.get("out_sharding")
    if out is not None and out.spec.unreduced:
        return False
    return bool(_products(prim, *args, **params) or _named(prim, *args, **params))


def keep_all_but_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """Keep everything but what was gathered, its parts, and copies that cost nothing to make again."""
    return prim.name not in ("all_gather_reduced", "broadcast_in_dim", "slice", "squeeze")
