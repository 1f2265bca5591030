"""Stand-in for MaxText's published runs on pods, from its settings (configs/v5e/16b.sh, v5p/32b.sh, v4/22b.sh).

Llama-like: layers in a scan; RMSNorm; rotary positions; gated SiLU or plain ReLU; vocabulary 32000, looked up as a
one-hot product, separate head computed in float32; float32 parameters and moments, bfloat16 compute; splash attention
in blocks of 512; Adam; parameters over `fsdp` (their width) and `tensor`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, CONTEXT, BLOCK = 32000, 2048, 512
KEPT = ("q", "k", "v", "out", "gate", "up", "down")


@dataclass(frozen=True)
class Model:
    """Sizes. `heads` are of queries, keys and values alike; `gated`: SiLU of one product times another, else ReLU."""

    width: int
    heads: int
    mlp: int
    layers: int
    head: int = 128
    gated: bool = True


def parameters(mesh: Mesh, model: Model) -> dict[str, Any]:
    """Shapes of all parameters with where they lie."""

    def leaf(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    width, mlp, layers, joined = model.width, model.mlp, model.layers, model.heads * model.head
    into, back = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
    layer = {name: leaf(into, layers, width, joined) for name in "qkv"}
    layer |= {"out": leaf(back, layers, joined, width), "norm_1": leaf(P(), layers, width)}
    layer |= {name: leaf(into, layers, width, mlp) for name in ("gate", "up")[not model.gated :]}
    layer |= {"down": leaf(back, layers, mlp, width), "norm_2": leaf(P(), layers, width)}
    head = leaf(P("fsdp", "tensor"), width, VOCAB)
    return {"token": leaf(P("tensor", "fsdp"), VOCAB, width), "head": head, "norm": leaf(P(), width), "layers": layer}


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(jnp.bfloat16) * weight.astype(jnp.bfloat16)


def rotate(x: jax.Array) -> jax.Array:
    """Of x [rows, context, heads, head]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(CONTEXT)[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(jnp.bfloat16)


def attention_over(mesh: Mesh, heads: int) -> Callable[..., jax.Array]:
    """Causal attention, every device its rows and heads: [rows, heads, context, head] x 3 -> the same."""
    here = heads // mesh.shape["tensor"]
    mask = masks.MultiHeadMask([masks.CausalMask((CONTEXT, CONTEXT))] * here)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), BLOCK))
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    spec = P("fsdp", "tensor")
    return jax.shard_map(jax.vmap(kernel), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)


def build(mesh: Mesh, model: Model, rows: int, keep: bool) -> tuple[Any, Any, Any, Any]:
    """The step (parameters, moments, batch) -> the same and the loss, and the shapes of its arguments.

    Args:
        mesh: of axes `fsdp` and `tensor`.
        model: its sizes.
        rows: of each device.
        keep: products of a layer are kept for the backward pass (MaxText's "minimal"); else all is computed again.
    """
    attention = attention_over(mesh, model.heads)
    optimizer = optax.adamw(3e-5, b2=0.95, weight_decay=0.1)

    def lies(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    into = ("gate", "up")[not model.gated :]

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        weight = {name: layer[name].astype(jnp.bfloat16) for name in KEPT if name in layer}
        h = norm(x, layer["norm_1"])
        q, k, v = (checkpoint_name(lies(h @ weight[name], "fsdp", None, "tensor"), name) for name in "qkv")
        q, k, v = (array.reshape(*h.shape[:2], model.heads, model.head) for array in (q, k, v))
        q, k, v = (array.transpose(0, 2, 1, 3) for array in (rotate(q) / model.head**0.5, rotate(k), v))
        mixed = attention(q.astype(jnp.bfloat16), k, v).transpose(0, 2, 1, 3).reshape(*h.shape[:2], -1)
        x = x + checkpoint_name(lies(mixed @ weight["out"], "fsdp", None, "tensor"), "out")
        h = norm(x, layer["norm_2"])
        wide = [checkpoint_name(lies(h @ weight[name], "fsdp", None, "tensor"), name) for name in into]
        wide = jax.nn.silu(wide[0]) * wide[1] if model.gated else jax.nn.relu(wide[0])
        down = checkpoint_name(wide @ weight["down"], "down")
        return lies(x + down, "fsdp", None, "tensor"), None

    policy = jax.checkpoint_policies.save_only_these_names(*KEPT) if keep else None
    remat = functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        chosen = jax.nn.one_hot(batch["inputs"], VOCAB, dtype=jnp.bfloat16)
        x = lies(chosen @ params["token"].astype(jnp.bfloat16), "fsdp", None, "tensor")
        x, _ = jax.lax.scan(remat(block), x, params["layers"])
        logits = lies(norm(x, params["norm"]).astype(jnp.float32) @ params["head"], "fsdp", None, "tensor")
        score = jnp.sum(logits * jax.nn.one_hot(batch["targets"], VOCAB), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - score)

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    shapes = parameters(mesh, model)
    moments = jax.eval_shape(optimizer.init, shapes)
    moments = optax.tree_utils.tree_map_params(optimizer, lambda _, leaf: leaf, moments, shapes)
    tokens = jax.ShapeDtypeStruct((rows * mesh.size, CONTEXT), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    return step, shapes, moments, {"inputs": tokens, "targets": tokens}
