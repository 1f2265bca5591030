"""Generation: the time to the first token and the tokens a second after it."""

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podling.config import ModelConfig
from podling.generate.decode import Timing, generate
from podling.generate.settings import Settings
from podling.measure.peaks import reading_s
from podling.model.spec import Params

MOST = 128
"""Tokens of a prompt, and new ones after it, at most."""


@dataclass(frozen=True)
class GenerationSpeed:
    """Of so many prompts at once, in float32, as `podling generate` does by default."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    tokens_per_s: float | None
    """After the first, of all prompts together; None where there was only one."""
    most_tokens_per_s: float
    """As many as reading the weights and the cache allows, once for each token of all prompts."""

    @property
    def read_share(self) -> float | None:
        """How much of the time reading them explains."""
        return None if self.tokens_per_s is None else self.tokens_per_s / self.most_tokens_per_s


def measure_generation(params: Params, cfg: ModelConfig, prompts: int, device: Any) -> GenerationSpeed:
    """Generate twice; the second time counts.

    Args:
        params: of any placement.
        cfg: the model.
        prompts: how many at once, of random tokens.
        device: the process's first, which generates; how fast it reads as many bytes is measured.
    """
    prompt_tokens = min(MOST, max(1, cfg.context // 2))
    new_tokens = min(MOST, cfg.context - prompt_tokens + 1)
    ids = np.random.default_rng(0).integers(1, cfg.vocab_size, (prompts, prompt_tokens)).tolist()
    _timed(params, cfg, ids, new_tokens)  # compiles
    first_token_s, timing = _timed(params, cfg, ids, new_tokens)
    cache_bytes = 2 * 4 * cfg.layers * cfg.heads * cfg.head_dim * (prompt_tokens + new_tokens // 2) * prompts
    return GenerationSpeed(
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        first_token_s=first_token_s,
        tokens_per_s=timing.decoded / timing.decode_s if timing.decoded else None,
        most_tokens_per_s=prompts / reading_s(device, _bytes(params) + cache_bytes, jnp.dtype(jnp.float32)),
    )


def _timed(params: Params, cfg: ModelConfig, prompts: list[list[int]], new_tokens: int) -> tuple[float, Timing]:
    """Seconds to the first token, and the rest."""
    timing, first_token_s, began_s = Timing(), 0.0, time.perf_counter()
    never: dict[str, Any] = {"end_id": 0, "never_ids": (0,)}  # so that all prompts go on to the end
    for _ in generate(params, cfg, prompts, Settings(max_tokens=new_tokens), **never, dtype=jnp.float32, timing=timing):
        first_token_s = first_token_s or time.perf_counter() - began_s
    return first_token_s, timing


def _bytes(params: Any) -> int:
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
