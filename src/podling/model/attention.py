"""Scaled dot-product attention (Vaswani et al. 2017, equation 1), scores and softmax in float32.

`attention` is the reference, for any mask; `causal_attention` also offers kernels that compute the same for a device.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from podling.chips import chip_of
from podling.kernels import PLATFORM, attention_problem
from podling.model.ops import dropout, einsum
from podling.parallel.rules import activation_spec, has_layout

Heads = Float[Array, "B T H K"]
CausalAttention = Callable[[Heads, Heads, Heads, jax.Array | None], Heads]
"""Of queries, keys, values and a dropout key."""

MASKED = -1e30  # finite, so that a fully masked row gives a uniform softmax and not NaN


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """True where position t may look at position s: s <= t."""
    positions = jnp.arange(length)
    return positions[:, None] >= positions[None, :]


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    mask: Bool[Array, "*#B T S"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "B T H K"]:
    """Each query's weighted mean of the values it may see.

    Args:
        q: queries, in the compute dtype.
        k: keys.
        v: values.
        mask: True where the query may see the key; [T, S], or [B, T, S] when rows differ.
        dropout_rate: probability of dropping a weight.
        dropout_key: no key, no dropout.
    """
    scores = einsum("bthk,bshk->bhts", q, k, out_dtype=jnp.float32) * (q.shape[-1] ** -0.5)
    mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(q.dtype)
    weights = dropout(weights, dropout_rate, dropout_key)
    return einsum("bhts,bshk->bthk", weights, v)


def causal_attention(which: str, length: int, dropout_rate: float = 0.0) -> CausalAttention:
    """Attention of every position to those up to its own.

    Args:
        which: `reference`; or a kernel, which drops no weights and never writes the scores to memory: `fused` or
            `splash` on TPUs (interpreted elsewhere, slowly), `cudnn` on GPUs.
        length: T.
        dropout_rate: probability of dropping a weight, where a key is given.

    Raises:
        ValueError: no such attention; or, while tracing, one that cannot take these sizes or is to drop weights.
    """
    if which == "reference":
        return partial(_reference, mask=causal_mask(length), dropout_rate=dropout_rate)
    if which not in PLATFORM:
        raise ValueError(f"no attention is called {which!r}")

    def on_mesh(q: Heads, k: Heads, v: Heads, dropout_key: jax.Array | None) -> Heads:
        dropped = dropout_rate if dropout_key is not None else 0.0
        problem, takes = attention_problem(which, q.shape[1], q.shape[3], dropped, q.dtype.name)
        if problem:
            raise ValueError(f"{problem}; it takes {takes}")
        if not has_layout():
            return _on_device(q, k, v, which)
        # A kernel is one device's: each has its own sequences and heads.
        spec = PartitionSpec(*activation_spec(("batch", "sequence", "heads")), None)
        kernel = partial(_on_device, which=which)
        return jax.shard_map(kernel, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)

    return on_mesh


def _reference(
    q: Heads, k: Heads, v: Heads, dropout_key: jax.Array | None, *, mask: Bool[Array, "T T"], dropout_rate: float
) -> Heads:
    return attention(q, k, v, mask, dropout_rate=dropout_rate, dropout_key=dropout_key)


def _on_device(q: Heads, k: Heads, v: Heads, which: str) -> Heads:
    if which == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    platform, kind = target()
    # Pallas takes half a second to import, and a run without a kernel never needs it.
    if which == "splash":
        from podling.model.splash import splash_attention

        return splash_attention(q, k, v, interpret=platform != "tpu")
    from podling.model.fused_attention import fused_attention

    chip = chip_of(kind)
    flat = (*q.shape[:2], q.shape[2] * q.shape[3])
    out = fused_attention(
        q.reshape(flat), k.reshape(flat), v.reshape(flat), q.shape[2],
        mxu_size=chip.mxu_size if chip and chip.mxu_size else 128, interpret=platform != "tpu",
    )  # fmt: skip
    return out.reshape(q.shape)


def target() -> tuple[str, str]:
    """Platform and kind of device that a program is traced for: the ambient mesh's, whose devices need not be here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend(), jax.devices()[0].device_kind
    return device.platform, device.device_kind
