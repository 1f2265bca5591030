"""The name table is a bijection, and translating there and back is the identity."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from podling.config import ModelConfig
from podling.interop.names import TABLE, from_hf, hf_shapes, leaf_paths, to_hf
from podling.model.spec import abstract_params, padded_vocab

configs = st.builds(
    lambda layers, heads, head_dim, mlp, context, vocab: ModelConfig(
        layers=layers, heads=heads, embed=heads * head_dim, mlp=mlp, context=context, vocab_size=vocab
    ),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 6), st.integers(1, 140),
)  # fmt: skip


def numbered(cfg: ModelConfig):
    """Parameters in which every number is another one."""
    leaves, tree = jax.tree.flatten(abstract_params(cfg))
    start, out = 1, []
    for leaf in leaves:
        out.append(np.arange(start, start + leaf.size, dtype=np.float32).reshape(leaf.shape))
        start += leaf.size
    return tree.unflatten(out)


def test_every_leaf_has_one_name_and_every_name_one_leaf():
    assert {entry.leaf for entry in TABLE} == leaf_paths() and len(TABLE) == len(leaf_paths())
    assert len({entry.name for entry in TABLE}) == len(TABLE)


@settings(max_examples=25, deadline=None)
@given(configs)
def test_there_and_back_is_the_identity(cfg):
    params = numbered(cfg)
    tensors = to_hf(params, cfg)
    assert {name: tensor.shape for name, tensor in tensors.items()} == hf_shapes(cfg)
    values = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    dropped = (padded_vocab(cfg) - cfg.vocab_size) * cfg.embed
    assert len(np.unique(values)) == len(values) == sum(x.size for x in jax.tree.leaves(params)) - dropped
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(from_hf(tensors, cfg)), strict=True):
        if before.shape == (padded_vocab(cfg), cfg.embed) and before.ravel()[0] == 1:  # the token embedding
            assert not after[cfg.vocab_size :].any()
            before, after = before[: cfg.vocab_size], after[: cfg.vocab_size]
        np.testing.assert_array_equal(before, after)


def test_queries_keys_and_values_lie_side_by_side():
    cfg = ModelConfig(layers=2, heads=2, embed=4, mlp=8, context=3, vocab_size=5)
    params = numbered(cfg)
    kernel = to_hf(params, cfg)["h.1.attn.c_attn.weight"]
    for part in range(3):
        np.testing.assert_array_equal(kernel[:, part * 4 : part * 4 + 4], params.blocks.qkv_kernel[1, part])


def test_the_published_shapes():
    """Names and shapes as in the files of the 124M model (openai-community/gpt2)."""
    cfg = ModelConfig(layers=12, heads=12, embed=768, mlp=3072, context=1024, vocab_size=50257)
    shapes = hf_shapes(cfg)
    assert len(shapes) == 2 + 12 * 12 + 2
    assert shapes["wte.weight"] == (50257, 768) and shapes["wpe.weight"] == (1024, 768)
    assert shapes["h.0.attn.c_attn.weight"] == (768, 2304) and shapes["h.11.attn.c_attn.bias"] == (2304,)
    assert shapes["h.5.mlp.c_fc.weight"] == (768, 3072) and shapes["h.5.mlp.c_proj.weight"] == (3072, 768)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 124_439_808


def test_device_arrays_translate_too():
    cfg = ModelConfig(layers=1, heads=1, embed=2, mlp=4, context=2, vocab_size=3)
    params = numbered(cfg)
    placed = jax.tree.map(jnp.asarray, params)
    for name, tensor in to_hf(placed, cfg).items():
        np.testing.assert_array_equal(tensor, to_hf(params, cfg)[name])
