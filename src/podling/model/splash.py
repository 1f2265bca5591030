"""Causal attention by JAX's splash kernel for TPUs: scores never leave the chip.

Blockwise softmax as in Dao et al. 2022 (arXiv:2205.14135); blocks above the diagonal are skipped. The kernel is
`jax.experimental.pallas.ops.tpu.splash_attention`. Elsewhere than on a TPU it is interpreted, which is slow: for tests.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

from podling.kernels import block

FORWARD, BACKWARD = 512, 512
"""Largest blocks of queries and keys. Larger ones skip less of what the mask hides, smaller ones start more often."""


def splash_attention(
    q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], v: Float[Array, "B T H K"], *, interpret: bool = False
) -> Float[Array, "B T H K"]:
    """`attention` under the causal mask, on one device: no layout, or inside `shard_map`.

    Args:
        q: queries; sizes that `kernels.attention_problem` lets pass.
        k: keys.
        v: values.
        interpret: run the kernel's operations one by one, for a device that is no TPU.
    """
    length, heads, size = q.shape[1:]
    q = (q.astype(jnp.float32) * size**-0.5).astype(q.dtype)  # the kernel does not scale
    by_head = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    kernel = _kernel(length, heads, interpret)
    return jnp.swapaxes(jax.vmap(kernel)(*by_head), 1, 2)


def _kernel(length: int, heads: int, interpret: bool) -> Any:
    forward, backward = block(length, FORWARD), block(length, BACKWARD)
    sizes = splash.BlockSizes(
        block_q=forward,
        block_kv=forward,
        block_kv_compute=forward,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_kv_dkv_compute=backward,
        use_fused_bwd_kernel=True,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
