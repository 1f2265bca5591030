"""GPT-2 exactly: against `transformers` and PyTorch in float32, on random small shapes and on the 124M model's."""

import dataclasses

import numpy as np
import pytest

from podling.config import ModelConfig, TrainConfig

pytestmark = pytest.mark.parity

SMALL = 4


def random_config(seed: int) -> tuple[ModelConfig, dict]:
    """A shape with nothing round about it: odd vocabularies, MLPs of any width, sequences shorter than the context."""
    rng = np.random.default_rng(seed)
    heads, head_dim = int(rng.integers(1, 5)), int(rng.integers(3, 17))
    context = int(rng.integers(10, 40))
    cfg = ModelConfig(
        layers=int(rng.integers(1, 4)),
        heads=heads,
        embed=heads * head_dim,
        mlp=int(rng.integers(8, 100)),
        context=context,
        vocab_size=int(rng.integers(20, 400)),
    )
    length = int(rng.integers(2, context // 2)) * 2
    remat = ("none", "dots", "full")[seed % 3]
    train = TrainConfig(remat=remat, loss_chunk=length // 2 if seed % 2 else 0)
    return cfg, {"rows": int(rng.integers(2, 5)), "length": length, "train": train}


def check(found) -> None:
    assert found.logits <= 1e-4
    assert found.loss <= 1e-5
    assert found.worst_gradient[1] <= 1e-4, found.worst_gradient
    assert found.worst_adamw[1] <= 2e-4, found.worst_adamw
    assert found.adamw_over == 0
    assert found.key_bias_gradient <= 1e-4
    assert found.greedy and found.greedy_tokens > 0
    assert found.clipped


@pytest.mark.parametrize("seed", range(SMALL))
def test_a_random_small_model(seed):
    from reference import compare

    cfg, how = random_config(seed)
    check(compare(cfg, seed=seed, **how))


def test_the_124m_shape():
    """Adam divides a gradient by its own size, so where a gradient is rounding noise its step is too: of 124 million
    numbers some always cancel to nearly nothing. eps = 1e-6, above that noise and below most gradients, makes the step
    of every number well defined; the small models use the default."""
    from reference import OPTIMIZER, compare

    cfg = ModelConfig(layers=12, heads=12, embed=768, mlp=3072, context=1024, vocab_size=50257)
    found = compare(cfg, rows=1, length=64, seed=0, optimizer=dataclasses.replace(OPTIMIZER, eps=1e-6))
    assert found.parameters == 124_439_808
    check(found)
