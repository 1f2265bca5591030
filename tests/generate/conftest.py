"""Parameters for tests of generation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.model.spec import Leaf, Params, param_specs


@pytest.fixture(scope="session")
def draw_params() -> Callable[..., Params]:
    """Random in every leaf, so that a bias or LayerNorm used in the wrong place shows."""

    def draw(cfg: ModelConfig, spread: float) -> Params:
        rng = np.random.default_rng(0)

        def leaf(spec: Leaf) -> np.ndarray:
            return (spec.init == "ones") + spread * rng.standard_normal(spec.shape, np.float32)

        params = jax.tree.map(leaf, param_specs(cfg))
        params.token_embed[cfg.vocab_size :] = 0
        return jax.tree.map(jnp.asarray, params)

    return draw
