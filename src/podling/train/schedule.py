"""Learning rate as a pure function of the step."""

import optax

from podling.config import OptimizerConfig


def learning_rate(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up to the peak, then a decay that reaches `lr_floor` times the peak when the last step is done.

    The n-th of W warm-up updates uses n/W of the peak, so that none is made at zero.

    cosine: half a cosine (Loshchilov & Hutter 2017, equation 5). linear: a straight line. wsd: constant, then a
    straight line over the last `decay_fraction` of the steps (Hu et al. 2024, section 4).

    Args:
        cfg: peak, shape, warm-up and floor.
        steps: optimizer steps of the whole run; update number n (from 0) uses the value at n.
    """
    floor = cfg.lr * cfg.lr_floor
    warmup = optax.linear_schedule(cfg.lr / max(cfg.warmup_steps, 1), cfg.lr, max(cfg.warmup_steps - 1, 1))
    after = max(steps - cfg.warmup_steps, 1)
    match cfg.schedule:
        case "cosine":
            decay = optax.cosine_decay_schedule(cfg.lr, after, alpha=cfg.lr_floor)
        case "linear":
            decay = optax.linear_schedule(cfg.lr, floor, after)
        case "wsd":
            decay_steps = min(max(round(steps * cfg.decay_fraction), 1), after)
            decay = optax.linear_schedule(cfg.lr, floor, decay_steps, transition_begin=after - decay_steps)
    return optax.join_schedules([warmup, decay], [cfg.warmup_steps]) if cfg.warmup_steps else decay
