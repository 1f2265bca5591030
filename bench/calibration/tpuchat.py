"""Stand-in for tpuchat's 160M ablation model, written from its published settings.

8 layers, unrolled; width 1024; 4 query heads of 256 that share one key and value head; rotary positions; RMSNorm
without weights, on queries and keys too; SwiGLU of 3072; vocabulary 32768, separate head; logits capped at 15 by tanh;
everything in bfloat16, moments too; splash attention in blocks of 1024; AdamW; rows of 2048 tokens, gradients of
micro-batches summed in a scan.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

LAYERS, WIDTH, HEADS, HEAD, MLP, VOCAB = 8, 1024, 4, 256, 3072, 32768
CONTEXT, ROWS, MICRO_STEPS, CAP, BLOCK = 2048, 4, 16, 15.0, 1024


def parameters() -> dict[str, Any]:
    """Shapes of all parameters: 163.6M."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    layer = {
        "q": leaf(WIDTH, HEADS, HEAD),
        "k": leaf(WIDTH, 1, HEAD),
        "v": leaf(WIDTH, 1, HEAD),
        "out": leaf(HEADS, HEAD, WIDTH),
        "gate": leaf(WIDTH, MLP),
        "up": leaf(WIDTH, MLP),
        "down": leaf(MLP, WIDTH),
    }
    return {"token": leaf(VOCAB, WIDTH), "head": leaf(WIDTH, VOCAB), "layers": [layer] * LAYERS}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: jax.Array) -> jax.Array:
    """Of x [rows, heads, context, HEAD]."""
    frequency = 1.0 / 10000 ** (jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
    angle = jnp.outer(jnp.arange(CONTEXT, dtype=jnp.float32), frequency)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)


def hidden(params: Any, tokens: jax.Array) -> jax.Array:
    sizes = {
        name: BLOCK for name in ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    }
    mask = masks.MultiHeadMask([masks.CausalMask((CONTEXT, CONTEXT))] * HEADS)
    attention = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=splash.BlockSizes(**sizes))
    x = norm(params["token"][tokens])
    for layer in params["layers"]:
        h = norm(x)
        q, k, v = (jnp.einsum("btd,dhk->bhtk", h, layer[name]) for name in "qkv")
        mixed = jax.vmap(attention)(norm(rotate(q)), norm(rotate(k)), v)
        x = x + jnp.einsum("bhtk,hkd->btd", mixed, layer["out"])
        h = norm(x)
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return norm(x)


def loss_from(h: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """All logits at once, in float32."""
    logits = CAP * jnp.tanh(jnp.einsum("btd,dv->btv", h, head).astype(jnp.float32) / CAP)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def build() -> tuple[Any, Any, Any, Any]:
    """The step (parameters, moments, batch) -> the same and the loss, and the shapes of its arguments."""
    optimizer = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return loss_from(hidden(params, batch["inputs"]), params["head"], batch["targets"])

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        def add(total: Any, micro: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(params, micro)
            return jax.tree.map(jnp.add, total, gradients), loss

        gradients, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        gradients = jax.tree.map(lambda leaf: leaf / MICRO_STEPS, gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, losses.mean()

    shapes = parameters()
    tokens = jax.ShapeDtypeStruct((MICRO_STEPS, ROWS, CONTEXT), jnp.int32)
    return step, shapes, jax.eval_shape(optimizer.init, shapes), {"inputs": tokens, "targets": tokens}
