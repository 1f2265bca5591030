"""Every attention against the reference, with gradients, on several meshes; kernels interpreted on the CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from podling.config import ModelConfig
from podling.model import fused_attention
from podling.model.attention import causal_attention
from podling.model.form import Form
from podling.model.gpt import forward
from podling.model.spec import init_params
from podling.parallel.mesh import make_mesh

MESHES = ["data=8", "data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4"]


def _inputs(batch: int, length: int, heads: int, size: int, dtype: jnp.dtype) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (batch, length, heads, size)).astype(dtype) for key in keys]


def _with_gradients(which: str, q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array) -> list[jax.Array]:
    """Output and the gradients of its weighted sum."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array) -> list[jax.Array]:
        attention = causal_attention(which, q.shape[1])
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, None), q, k, v)
        return [out, *pull(weights)]

    return run(q, k, v, weights)


CASES = [
    ("splash", 128, 2, 64),
    ("fused", 128, 3, 64),  # half a tile of lanes lies beyond the last head
    ("fused", 128, 1, 128),
    ("fused", 128, 1, 32),  # less than a tile
    ("fused", 128, 1, 256),  # two
    ("fused", 384, 2, 64),  # three blocks
]


@pytest.mark.parametrize(("which", "length", "heads", "size"), CASES)
def test_a_kernel_equals_the_reference_with_gradients(
    which: str, length: int, heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_attention, "FORWARD_BLOCK", 128)
    arrays = _inputs(2, length, heads, size, jnp.float32)
    for got, expected in zip(_with_gradients(which, *arrays), _with_gradients("reference", *arrays), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_model_has_the_same_gradient_with_a_kernel(remat: str) -> None:
    """The kernel's own gradient under a scan and under each policy, with the names of what is kept."""
    cfg = ModelConfig(layers=2, heads=4, embed=64, mlp=128, context=128, vocab_size=100)
    tokens = jax.random.randint(jax.random.key(1), (4, 128), 0, 100)

    def gradient(which: str) -> Any:
        form = Form(attention=which, remat=remat)
        params = init_params(cfg, key=jax.random.key(0))
        return jax.jit(jax.grad(lambda p: jnp.sum(forward(p, tokens, cfg, form=form) ** 3)))(params)

    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None)))
    with jax.set_mesh(mesh):
        got, expected = gradient("fused"), gradient("reference")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4 * float(jnp.abs(other).max() + 1e-3))


def test_a_kernel_that_is_to_drop_weights_says_so() -> None:
    q, k, v, _ = _inputs(1, 128, 1, 64, jnp.float32)
    with pytest.raises(ValueError, match="cannot drop attention weights"):
        causal_attention("fused", 128, dropout_rate=0.1)(q, k, v, jax.random.key(0))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("which", ["fused", "splash"])
def test_a_kernel_equals_the_reference_on_a_mesh(which: str, mesh: str) -> None:
    arrays = _inputs(8, 128, 4, 16, jnp.float32)
    expected = _with_gradients("reference", *arrays)
    mesh_of = make_mesh(mesh)
    with jax.set_mesh(mesh_of):
        sharding = NamedSharding(mesh_of, PartitionSpec(("data", "fsdp"), None, "tensor", None))
        got = _with_gradients(which, *(jax.device_put(x, sharding) for x in arrays))
    for one, other in zip(got, expected, strict=True):
        assert one.sharding == sharding
        np.testing.assert_allclose(one, other, atol=2e-5)
