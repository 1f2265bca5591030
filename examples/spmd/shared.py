"""What the three programs share: podling's own model, loss and optimizer, and bytes to learn from.

Nothing in here knows how many devices there are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from podling.model import gpt
from podling.model.loss import cross_entropy
from podling.model.spec import Params, init_params
from podling.train.optimizer import make_optimizer

CONFIG = Config(
    model=ModelConfig(layers=2, heads=4, embed=64, mlp=256, context=32, vocab_size=256),
    optimizer=OptimizerConfig(lr=3e-3, warmup_steps=5),
    train=TrainConfig(steps=50),
)
ROWS = 16  # in a batch, over all devices: their number has to divide it
TEXT = Path(gpt.__file__).read_bytes()

optimizer = make_optimizer(CONFIG.optimizer, CONFIG.model, CONFIG.train.steps)


def init() -> Params:
    """The parameters before the first step."""
    return init_params(CONFIG.model, key=jax.random.key(CONFIG.train.seed))


def loss(params: Params, inputs: Any, targets: Any) -> jax.Array:
    """Mean nats per byte of the rows it is given; inputs and targets are int32 [rows, context]."""
    weights = jnp.ones_like(targets, jnp.float32)
    nll, count = cross_entropy(params, gpt.forward(params, inputs, CONFIG.model), targets, weights, CONFIG.model)
    return nll / count


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step, int32 [ROWS, context], the same whenever it is asked for."""
    context = CONFIG.model.context
    starts = np.random.default_rng(step).integers(0, len(TEXT) - context, ROWS)
    rows = np.stack([np.frombuffer(TEXT, np.uint8, context + 1, start) for start in starts]).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def main(train: Callable[[int], tuple[Params, list[float]]]) -> None:
    """Train and print the loss now and then."""
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU plays eight devices; an accelerator is taken as it is
    if ROWS % jax.device_count():
        raise SystemExit(f"{ROWS} rows do not divide over {jax.device_count()} devices: change ROWS in {__file__}")
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    _, losses = train(CONFIG.train.steps)
    for step in range(0, len(losses), 10):
        print(f"step {step:2}  {losses[step]:.4f} nats per byte")
    print(f"step {len(losses) - 1:2}  {losses[-1]:.4f} nats per byte")
