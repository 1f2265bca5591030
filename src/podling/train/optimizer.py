"""AdamW with the decay groups of the spec tree."""

from typing import Any

import optax

from podling.config import ModelConfig, OptimizerConfig
from podling.model.spec import decay_mask
from podling.train.schedule import learning_rate


def make_optimizer(cfg: OptimizerConfig, model: ModelConfig, steps: int) -> Any:
    """An `optax.GradientTransformation` (whose own types know no dataclass pytrees, hence `Any`).

    Clip by global norm, then AdamW (Loshchilov & Hutter 2019), decaying matrices and embeddings only.
    """
    clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm > 0 else optax.identity()
    adamw = optax.adamw(
        learning_rate(cfg, steps),
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        mask=decay_mask(model),
    )
    return optax.chain(clip, adamw)
