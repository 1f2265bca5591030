"""The same ids through two programs: logits to compare."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from podling.config import ModelConfig
from podling.generate.steps import NO_MESH, place
from podling.model.gpt import forward, logits
from podling.model.spec import Params


def own_logits(params: Params, cfg: ModelConfig, ids: np.ndarray) -> np.ndarray:
    """Float32 logits [B, T, vocab_size] of ids [B, T], padding of the vocabulary left out."""
    placed = place(params, cfg, jnp.float32)
    with jax.set_mesh(NO_MESH):
        return np.asarray(_logits(placed, jnp.asarray(ids), cfg))[..., : cfg.vocab_size]


@partial(jax.jit, static_argnames=("cfg",))
def _logits(params: Params, ids: Int[Array, "B T"], cfg: ModelConfig) -> Float[Array, "B T V"]:
    return logits(params, forward(params, ids, cfg), cfg)


def transformers_logits(folder: Path, ids: np.ndarray) -> np.ndarray | None:
    """The same from what AutoModelForCausalLM loads from `folder`; None without transformers and torch."""
    if not (find_spec("transformers") and find_spec("torch")):
        return None
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()
