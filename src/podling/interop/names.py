"""One table between podling's parameter tree and GPT-2's tensor names in Hugging Face `transformers`.

GPT-2's linear layers are stored [in, out] there too, so every matrix but one keeps its layout: queries, keys and
values lie side by side, [D, 3N], where podling stacks them, [3, D, N]. One entry stands for all layers of a leaf.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from podling.config import ModelConfig
from podling.model.spec import Block, Params, padded_vocab, param_specs

PREFIX = "transformer."


class Entry(NamedTuple):
    """A leaf of podling's tree and its tensor name; `{}` is the layer."""

    leaf: str
    name: str


TABLE = (
    Entry("token_embed", "wte.weight"),
    Entry("pos_embed", "wpe.weight"),
    Entry("blocks.ln1_scale", "h.{}.ln_1.weight"),
    Entry("blocks.ln1_bias", "h.{}.ln_1.bias"),
    Entry("blocks.qkv_kernel", "h.{}.attn.c_attn.weight"),
    Entry("blocks.qkv_bias", "h.{}.attn.c_attn.bias"),
    Entry("blocks.out_kernel", "h.{}.attn.c_proj.weight"),
    Entry("blocks.out_bias", "h.{}.attn.c_proj.bias"),
    Entry("blocks.ln2_scale", "h.{}.ln_2.weight"),
    Entry("blocks.ln2_bias", "h.{}.ln_2.bias"),
    Entry("blocks.up_kernel", "h.{}.mlp.c_fc.weight"),
    Entry("blocks.up_bias", "h.{}.mlp.c_fc.bias"),
    Entry("blocks.down_kernel", "h.{}.mlp.c_proj.weight"),
    Entry("blocks.down_bias", "h.{}.mlp.c_proj.bias"),
    Entry("final_scale", "ln_f.weight"),
    Entry("final_bias", "ln_f.bias"),
)


def hf_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a GPT-2 of this configuration, without prefix, and its shape there."""
    specs = param_specs(cfg)
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in TABLE:
        shape = _leaf(specs, entry).shape
        if entry.leaf == "token_embed":
            shape = (cfg.vocab_size, cfg.embed)
        elif entry.leaf == "blocks.qkv_kernel":
            shape = (cfg.layers, cfg.embed, 3 * cfg.heads * cfg.head_dim)
        elif entry.leaf == "blocks.qkv_bias":
            shape = (cfg.layers, 3 * cfg.heads * cfg.head_dim)
        names = _names(entry, cfg)
        shapes |= dict.fromkeys(names, shape[1:] if "{}" in entry.name else shape)
    return shapes


def to_hf(params: Params, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors by GPT-2 name, without prefix; vocabulary padding is dropped. Gradients translate as parameters do.

    Args:
        params: arrays of any kind; fetched to the host leaf by leaf.
        cfg: the model.
    """
    tensors: dict[str, np.ndarray] = {}
    for entry in TABLE:
        array = np.asarray(_leaf(params, entry))
        if entry.leaf == "token_embed":
            array = array[: cfg.vocab_size]
        elif entry.leaf == "blocks.qkv_kernel":  # [L, 3, D, N] -> [L, D, 3N]
            array = array.transpose(0, 2, 1, 3).reshape(cfg.layers, cfg.embed, -1)
        elif entry.leaf == "blocks.qkv_bias":
            array = array.reshape(cfg.layers, -1)
        layers = array if "{}" in entry.name else array[None]
        tensors |= zip(_names(entry, cfg), map(np.ascontiguousarray, layers), strict=True)
    return tensors


def from_hf(tensors: Mapping[str, np.ndarray], cfg: ModelConfig) -> Params:
    """The inverse of `to_hf`: float32 arrays on the host, vocabulary padding zero.

    Args:
        tensors: read once each, in order, so a lazy mapping never holds two models in memory.
        cfg: the model; every tensor has the shape that `hf_shapes` says.
    """
    leaves: dict[str, Any] = {}
    for entry in TABLE:
        array = np.stack([np.asarray(tensors[name], np.float32) for name in _names(entry, cfg)])
        if entry.leaf == "token_embed":
            array = np.pad(array, ((0, 0), (0, padded_vocab(cfg) - cfg.vocab_size), (0, 0)))
        elif entry.leaf == "blocks.qkv_kernel":  # [L, D, 3N] -> [L, 3, D, N]
            array = array.reshape(cfg.layers, cfg.embed, 3, -1).transpose(0, 2, 1, 3)
        elif entry.leaf == "blocks.qkv_bias":
            array = array.reshape(cfg.layers, 3, -1)
        leaves[entry.leaf] = np.ascontiguousarray(array if "{}" in entry.name else array[0])
    blocks = {leaf.removeprefix("blocks."): leaves.pop(leaf) for leaf in list(leaves) if leaf.startswith("blocks.")}
    return Params(**leaves, blocks=Block(**blocks))


def leaf_paths() -> set[str]:
    """Every leaf of podling's tree, as the table writes it."""
    top = {field.name for field in dataclasses.fields(Params)} - {"blocks"}
    return top | {f"blocks.{field.name}" for field in dataclasses.fields(Block)}


def _names(entry: Entry, cfg: ModelConfig) -> list[str]:
    return [entry.name.format(layer) for layer in range(cfg.layers)] if "{}" in entry.name else [entry.name]


def _leaf(tree: Params, entry: Entry) -> Any:
    for part in entry.leaf.split("."):
        tree = getattr(tree, part)
    return tree
