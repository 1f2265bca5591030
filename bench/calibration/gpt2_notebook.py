"""Stand-in for Google's "Train a GPT2 model with JAX on TPU" notebook, written from its published settings.

GPT-2 124M: 12 layers, unrolled; width 768, 12 heads of 64; vocabulary 50257, not padded; tied head; learned
positions; biases; float32 parameters, bfloat16 compute; attention through `jax.nn.dot_product_attention` with a mask,
as Flax NNX does; the whole batch's logits in bfloat16; AdamW under a cosine schedule; data parallel.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, HEADS, CONTEXT, VOCAB = 12, 768, 12, 1024, 50257
HEAD = WIDTH // HEADS


def parameters() -> dict[str, Any]:
    """Shapes of all parameters."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    layer = {
        "norm_1": leaf(2, WIDTH),
        "qkv": {name: (leaf(WIDTH, HEADS, HEAD), leaf(HEADS, HEAD)) for name in "qkv"},
        "out": (leaf(HEADS, HEAD, WIDTH), leaf(WIDTH)),
        "norm_2": leaf(2, WIDTH),
        "up": (leaf(WIDTH, 4 * WIDTH), leaf(4 * WIDTH)),
        "down": (leaf(4 * WIDTH, WIDTH), leaf(WIDTH)),
    }
    return {
        "token": leaf(VOCAB, WIDTH),
        "position": leaf(CONTEXT, WIDTH),
        "layers": [layer] * LAYERS,
        "norm": leaf(2, WIDTH),
    }


def half(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def norm(x: jax.Array, weights: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-6) * weights[0] + weights[1]).astype(jnp.bfloat16)


def drop(x: jax.Array, key: jax.Array | None) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, jnp.zeros_like(x))


def forward(params: Any, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
    keys = iter(jax.random.split(key, 2 * LAYERS + 1)) if key is not None else iter([None] * (2 * LAYERS + 1))
    table = half(params["token"])
    x = drop(table[tokens] + half(params["position"]), next(keys))
    mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
    for layer in params["layers"]:
        cast = half({name: leaf for name, leaf in layer.items() if not name.startswith("norm")})
        h = norm(x, layer["norm_1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, cast["qkv"][name][0]) + cast["qkv"][name][1] for name in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])
        x = x + drop(jnp.einsum("bthk,hkd->btd", mixed, cast["out"][0]) + cast["out"][1], next(keys))
        h = jax.nn.gelu(norm(x, layer["norm_2"]) @ cast["up"][0] + cast["up"][1])
        x = x + drop(h @ cast["down"][0] + cast["down"][1], next(keys))
    return norm(x, params["norm"]) @ table.T


def build(rows: int, dropout: bool) -> tuple[Any, Any, Any, Any]:
    """The step (parameters, moments, batch) -> the same and the loss, and the shapes of its arguments."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(5e-4, 90_000), weight_decay=0.1)

    def loss_of(params: Any, batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        logits = forward(params, batch["inputs"], key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        key = jax.random.wrap_key_data(batch["key"]) if dropout else None
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, key)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    shapes = parameters()
    tokens = jax.ShapeDtypeStruct((rows, CONTEXT), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    if dropout:
        batch["key"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return step, shapes, jax.eval_shape(optimizer.init, shapes), batch
