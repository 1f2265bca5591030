"""Stand-in for modded-nanogpt-jax, written from its published settings.

12 layers, unrolled; width 1024; 4 heads of 256; half of each head rotated; RMSNorm without weights, on queries and
keys too; first layer's values mixed into all; skips from the first half to the second; squared ReLU; vocabulary 50304,
separate head; logits capped by a sigmoid, then float32; everything in bfloat16; attention through
`jax.nn.dot_product_attention`; Muon for matrices of layers and Adam for the rest, computed on every device; 524288
tokens a step in micro-batches of 16 rows over 8 chips.
"""

from typing import Any

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HEADS, VOCAB, CAP = 12, 1024, 4, 50304, 15.0
HEAD, TOKENS, ROWS = WIDTH // HEADS, 524288, 16


def parameters() -> dict[str, Any]:
    """Shapes of all parameters."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    layer = {
        "qkv": leaf(3 * WIDTH, WIDTH),
        "out": leaf(WIDTH, WIDTH),
        "up": leaf(WIDTH, 4 * WIDTH),
        "down": leaf(4 * WIDTH, WIDTH),
        "mix": leaf(),
        "scale": leaf(),
        "start": leaf(2),
    }
    return {
        "token": leaf(VOCAB, WIDTH),
        "head": leaf(WIDTH, VOCAB),
        "skips": leaf(LAYERS // 2),
        "layers": [layer] * LAYERS,
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.finfo(x.dtype).eps)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def block(layer: Any, x: jax.Array, first: jax.Array, values: jax.Array | None, cos: jax.Array, sin: jax.Array) -> Any:
    x = layer["start"][0] * x + layer["start"][1] * first
    kernel = layer["qkv"].reshape(3, HEADS, HEAD, WIDTH)
    q, k, v = jnp.einsum("btc,shdc->sbthd", norm(x), kernel)
    values = v if values is None else values
    v = (1 - layer["mix"]) * v + layer["mix"] * values
    q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
    mixed = jax.nn.dot_product_attention(q, k, v, scale=layer["scale"], is_causal=True).reshape(x.shape)
    x = x + mixed @ layer["out"]
    return x + jnp.square(jax.nn.relu(norm(x) @ layer["up"])) @ layer["down"], values


def loss_of(params: Any, inputs: jax.Array, targets: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x = first = norm(params["token"][inputs])
    values, kept = None, []
    for number, layer in enumerate(params["layers"]):
        if number >= LAYERS // 2:
            x = x + params["skips"][number - LAYERS // 2] * kept.pop()
        x, values = block(layer, x, first, values, cos, sin)
        if number < LAYERS // 2:
            kept.append(x)
    logits = norm(x) @ params["head"]
    logits = (2 * CAP * jax.nn.sigmoid(logits / (CAP / 2))).astype(jnp.float32)
    score = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - score)


def orthogonal(gradient: jax.Array) -> jax.Array:
    """Newton and Schulz's iteration, five times."""
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if tall else gradient
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    return x.T if tall else x


def muon(params: list[jax.Array], gradients: list[jax.Array], moments: list[jax.Array], rate: jax.Array) -> Any:
    """All matrices. Those of one shape go through the iteration in a loop, which compiles in a fraction of the time."""
    towards, new, kept = [], [], []
    for gradient, moment in zip(gradients, moments, strict=True):
        kept.append(moment + (0.05 * (gradient - moment)).astype(moment.dtype))
        towards.append(gradient + (0.95 * (kept[-1] - gradient)).astype(moment.dtype))
    steps: dict[int, jax.Array] = {}
    for shape in dict.fromkeys(one.shape for one in towards):
        alike = [number for number, one in enumerate(towards) if one.shape == shape]
        turned = jax.lax.map(orthogonal, jnp.stack([towards[number] for number in alike]))
        steps |= {number: turned[place] for place, number in enumerate(alike)}
    for number, param in enumerate(params):
        size = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
        new.append(param - (rate * size).astype(param.dtype) * steps[number])
    return new, kept


def adam(
    param: jax.Array, gradient: jax.Array, moments: Any, rate: jax.Array, count: jax.Array
) -> tuple[jax.Array, Any]:
    m = (0.9 * moments[0] + 0.1 * gradient).astype(param.dtype)
    v = (0.95 * moments[1] + 0.05 * gradient**2).astype(param.dtype)
    update = rate * (m / (1 - 0.9**count)).astype(m.dtype) / (jnp.sqrt((v / (1 - 0.95**count)).astype(v.dtype)) + 1e-10)
    return param - update.astype(param.dtype), (m, v)


def is_matrix(leaf: Any) -> bool:
    """Muon's: what lies in a layer and has two axes."""
    return leaf.ndim == 2 and VOCAB not in leaf.shape


def build(context: int) -> tuple[Any, Any, Any, Any]:
    """The step (parameters, moments, batch) -> the same and the loss, and the shapes of its arguments."""
    micro_steps = TOKENS // context // ROWS

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        def add(carry: Any, micro: dict[str, jax.Array]) -> tuple[Any, None]:
            loss, gradients = jax.value_and_grad(loss_of)(
                params, micro["inputs"], micro["targets"], batch["cos"], batch["sin"]
            )
            return (jax.tree.map(jnp.add, carry[0], gradients), carry[1] + loss), None

        micro = {name: batch[name] for name in ("inputs", "targets")}
        (gradients, loss), _ = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), 0.0), micro)
        count = moments["count"] + 1
        rate = jnp.where(count < 1000, 1.0, 0.5)
        new, tree = jax.tree.flatten(params)
        kept = list(moments["leaves"])
        totals = [(leaf / micro_steps).astype(leaf.dtype) for leaf in jax.tree.leaves(gradients)]
        matrices = [number for number, leaf in enumerate(new) if is_matrix(leaf)]
        turned = muon(*([of[number] for number in matrices] for of in (new, totals, kept)), rate)
        for number, leaf, moment in zip(matrices, *turned, strict=True):
            new[number], kept[number] = leaf, moment
        for number in set(range(len(new))) - set(matrices):
            new[number], kept[number] = adam(new[number], totals[number], kept[number], rate, count)
        return jax.tree.unflatten(tree, new), {"leaves": kept, "count": count}, loss / micro_steps

    shapes = parameters()
    moments = [leaf if is_matrix(leaf) else (leaf, leaf) for leaf in jax.tree.leaves(shapes)]
    tokens = jax.ShapeDtypeStruct((micro_steps, ROWS, context), jnp.int32)
    table = jax.ShapeDtypeStruct((context, 1, HEAD // 2), jnp.bfloat16)
    state = {"leaves": moments, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    return step, shapes, state, {"inputs": tokens, "targets": tokens, "cos": table, "sin": table}
