"""Stand-in for tpuchat's 160M ablation model, written from its published settings.

8 layers, unrolled; width 1024; 3 or 4 query heads of 256 that share one key and value head; rotary positions; RMSNorm
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

LAYERS, WIDTH, HEAD, MLP, CONTEXT, VOCAB, CAP, BLOCK = 8, 1024, 256, 3072, 2048, 32768, 15.0, 1024


def parameters(heads: int) -> dict[str, Any]:
    """Shapes of all parameters: 163.6M with 4 heads, 159.4M with 3."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    layer = {
        "q": leaf(WIDTH, heads, HEAD),
        "k": leaf(WIDTH, 1, HEAD),
        "v": leaf(WIDTH, 1, HEAD),
        "out": leaf(heads, HEAD, WIDTH),
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


def hidden(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    sizes = {
        name: BLOCK for name in ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    }
    mask = masks.MultiHeadMask([masks.CausalMask((CONTEXT, CONTEXT))] * heads)
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


def whole_loss(h: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """All logits at once, in float32."""
    logits = CAP * jnp.tanh(jnp.einsum("btd,dv->btv", h, head).astype(jnp.float32) / CAP)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def halved_loss(h: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """The vocabulary in two parts, logits in bfloat16."""
    part = VOCAB // 2
    total, found = jnp.full(targets.shape, -jnp.inf), jnp.zeros(targets.shape)
    for start in (0, part):
        logits = CAP * jnp.tanh(jnp.einsum("btd,dv->btv", h, head[:, start : start + part]) / CAP)
        total = jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=-1))
        here = (targets >= start) & (targets < start + part)
        score = jnp.take_along_axis(logits, jnp.where(here, targets - start, 0)[..., None], axis=-1)[..., 0]
        found = found + jnp.where(here, score, 0.0)
    return jnp.mean(total - found)


def build(heads: int, rows: int, micro_steps: int, halved: bool) -> tuple[Any, Any, Any, Any]:
    """The step (parameters, moments, batch) -> the same and the loss, and the shapes of its arguments.

    Args:
        heads: of queries.
        rows: of one micro-batch.
        micro_steps: micro-batches in a step.
        halved: which loss.
    """
    optimizer = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    loss_from = halved_loss if halved else whole_loss

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return loss_from(hidden(params, batch["inputs"], heads), params["head"], batch["targets"])

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        def add(total: Any, micro: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(params, micro)
            return jax.tree.map(jnp.add, total, gradients), loss

        if micro_steps > 1:
            gradients, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
            gradients, loss = jax.tree.map(lambda leaf: leaf / micro_steps, gradients), losses.mean()
        else:
            loss, gradients = jax.value_and_grad(loss_of)(params, jax.tree.map(lambda leaf: leaf[0], batch))
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    shapes = parameters(heads)
    tokens = jax.ShapeDtypeStruct((micro_steps, rows, CONTEXT), jnp.int32)
    return step, shapes, jax.eval_shape(optimizer.init, shapes), {"inputs": tokens, "targets": tokens}
