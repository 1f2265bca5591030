"""The spec tree: sizes as published, initial values as stated, on every mesh the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.spec import (
    Leaf,
    abstract_params,
    decay_mask,
    init_params,
    padded_vocab,
    param_count,
    param_specs,
)
from podling.parallel.mesh import make_mesh
from podling.presets import preset_config

pytestmark = pytest.mark.usefixtures("quick_compile")

CFG = ModelConfig(layers=2, heads=4, embed=64, mlp=256, context=32, vocab_size=300)


def by_name(tree) -> dict[str, object]:
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("preset", "published"),
    [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)],
)
def test_parameter_counts_as_published(preset, published):
    cfg = dataclasses.replace(preset_config(preset).model, vocab_size=50257)
    assert cfg.context == 1024
    assert param_count(cfg) == published
    made = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(cfg)))
    assert made - published == (50304 - 50257) * cfg.embed  # the padding rows, which nobody publishes


def test_the_vocabulary_is_padded_to_tiles():
    sizes = {1: 128, 128: 128, 129: 256, 50257: 50304}
    assert {size: padded_vocab(dataclasses.replace(CFG, vocab_size=size)) for size in sizes} == sizes


def test_shapes_are_the_specs():
    params = init_params(CFG, key=jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in by_name(param_specs(CFG)).items()}
    assert {name: leaf.shape for name, leaf in by_name(params).items()} == shapes
    assert {name: leaf.shape for name, leaf in by_name(abstract_params(CFG)).items()} == shapes
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for name, leaf in by_name(param_specs(CFG)).items():
        assert isinstance(leaf, Leaf) and len(leaf.axes) == len(leaf.shape), name


def test_initial_values_have_the_stated_distribution():
    """Kolmogorov-Smirnov distance to the stated normal, at the level that one draw in a thousand would pass."""
    from math import erf, sqrt

    residual = 0.02 / sqrt(2 * CFG.layers)
    stds = dict.fromkeys(("token_embed", "pos_embed", "blocks.qkv_kernel", "blocks.up_kernel"), 0.02)
    stds |= dict.fromkeys(("blocks.out_kernel", "blocks.down_kernel"), residual)
    params = by_name(init_params(CFG, key=jax.random.key(7)))
    for name, std in stds.items():
        values = np.asarray(params[name], np.float64)
        values = np.sort((values[: CFG.vocab_size] if name == "token_embed" else values).ravel())
        theory = np.array([0.5 * (1 + erf(value / (std * sqrt(2)))) for value in values])
        distance = np.abs(theory - (np.arange(values.size) + 0.5) / values.size).max()
        assert distance < 1.95 / sqrt(values.size), name
    for name in params.keys() - stds:
        expected = 1.0 if name.endswith("_scale") else 0.0
        assert (np.asarray(params[name]) == expected).all(), name


def test_no_two_leaves_or_layers_share_their_values():
    params = by_name(init_params(CFG, key=jax.random.key(0)))
    firsts = [tuple(np.asarray(leaf).ravel()[:4].tolist()) for name, leaf in params.items() if "kernel" in name]
    firsts += [tuple(np.asarray(leaf)[1].ravel()[:4].tolist()) for name, leaf in params.items() if "kernel" in name]
    ratios = {round(first[1] / first[0], 4) for first in firsts}
    assert len(ratios) == len(firsts)


def test_another_key_is_another_model():
    first, again, other = (init_params(CFG, key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.blocks.up_kernel, again.blocks.up_kernel)
    assert (np.asarray(first.blocks.up_kernel) != np.asarray(other.blocks.up_kernel)).mean() > 0.99


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"])
def test_initial_values_do_not_depend_on_the_mesh(mesh):
    with jax.set_mesh(make_mesh("data=1", jax.devices()[:1])):
        alone = jax.jit(lambda: init_params(CFG, key=jax.random.key(3)))()
    with jax.set_mesh(make_mesh(mesh)):
        spread = jax.jit(lambda: init_params(CFG, key=jax.random.key(3)))()
    for (name, leaf), other in zip(by_name(alone).items(), jax.tree.leaves(spread), strict=True):
        # The bits drawn are the same; the last one of the normal's inverse error function depends on vectorisation.
        np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-9, err_msg=name)


def test_only_matrices_and_embeddings_decay():
    decayed = {name for name, decays in by_name(decay_mask(CFG)).items() if decays}
    assert decayed == {"token_embed", "pos_embed"} | {f"blocks.{k}_kernel" for k in ("qkv", "out", "up", "down")}
