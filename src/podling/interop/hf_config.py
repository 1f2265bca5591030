"""GPT-2's config.json: written for an export, and read with every variant that podling does not implement refused."""

from dataclasses import replace
from typing import Any

from podling.config import ModelConfig
from podling.errors import Problem
from podling.model.ops import LN_EPS
from podling.presets import PRESETS

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # two names of the tanh approximation


def hf_config(cfg: ModelConfig, eot_id: int) -> dict[str, Any]:
    """What `transformers` needs to build this model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.context,
        "n_ctx": cfg.context,
        "n_embd": cfg.embed,
        "n_layer": cfg.layers,
        "n_head": cfg.heads,
        "n_inner": None if cfg.mlp == 4 * cfg.embed else cfg.mlp,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LN_EPS,
        "resid_pdrop": cfg.dropout,
        "embd_pdrop": cfg.dropout,
        "attn_pdrop": cfg.dropout,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "dtype": "float32",
        "torch_dtype": "float32",  # the same, for transformers before 5
    }


def model_config(found: dict[str, Any], where: str) -> tuple[ModelConfig | None, list[Problem]]:
    """The configuration a config.json describes, or everything that podling cannot do about it.

    Dropout is left at 0: it is a choice of training, and no part of a trained model.
    """
    problems = _variants(found, where)
    sizes: dict[str, int] = {}
    for name, field in SIZES.items():
        value = found.get(name)
        if type(value) is int and value > 0:
            sizes[field] = value
        else:
            problems.append(Problem(f"{where}: {name}", f"{value!r} is not a size above zero"))
    mlp = found.get("n_inner") or 4 * sizes.get("embed", 0)
    if type(mlp) is not int or mlp < 0:
        problems.append(Problem(f"{where}: n_inner", f"{mlp!r} is not a size above zero"))
    if not problems and sizes["embed"] % sizes["heads"]:
        what = f"{sizes['heads']} heads do not divide {sizes['embed']}"
        problems.append(Problem(f"{where}: n_head", what))
    if problems:
        return None, problems
    cfg = ModelConfig(preset="gpt2", mlp=mlp, dropout=0.0, **sizes)
    for name, preset in PRESETS.items():
        if replace(preset.config.model, vocab_size=cfg.vocab_size) == replace(cfg, preset=name):
            cfg = replace(cfg, preset=name)
    return cfg, []


SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context",
    "n_embd": "embed",
    "n_layer": "layers",
    "n_head": "heads",
}

EXACT: dict[str, tuple[Any, str]] = {
    "scale_attn_weights": (True, "unscaled attention"),
    "scale_attn_by_inverse_layer_idx": (False, "attention scaled by layer"),
    "reorder_and_upcast_attn": (False, "reordered attention"),
    "add_cross_attention": (False, "cross-attention"),
    "tie_word_embeddings": (True, "a head of its own (untied)"),
    "quantization_config": (None, "quantised weights"),
}
"""Settings with one value that podling implements (their default), and what the others mean."""


def _variants(found: dict[str, Any], where: str) -> list[Problem]:
    problems = []
    if (kind := found.get("model_type")) != "gpt2":
        return [Problem(f"{where}: model_type", f"{kind!r} is not implemented", "podling reads gpt2")]
    activation = found.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        what = f"the activation {activation!r} is not implemented"
        problems.append(Problem(f"{where}: activation_function", what, f"podling has {ACTIVATIONS[0]}"))
    epsilon = found.get("layer_norm_epsilon", LN_EPS)
    if epsilon != LN_EPS:
        what = f"{epsilon} is not implemented"
        problems.append(Problem(f"{where}: layer_norm_epsilon", what, f"podling has {LN_EPS}"))
    for name, (value, meaning) in EXACT.items():
        if found.get(name, value) != value:
            problems.append(Problem(f"{where}: {name}", f"{meaning} is not implemented"))
    return problems
