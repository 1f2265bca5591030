"""Learning rates in closed form: at the beginning, in and after warm-up, in the middle, at the end and beyond it."""

import math

import numpy as np
import pytest

from podling.config import OptimizerConfig
from podling.train.schedule import learning_rate

STEPS, WARMUP, PEAK, FLOOR = 100, 10, 2e-3, 2e-4


def at(step: int, **fields) -> float:
    cfg = OptimizerConfig(lr=PEAK, warmup_steps=WARMUP, lr_floor=0.1, **fields)
    return float(learning_rate(cfg, STEPS)(step))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_warm_up(schedule):
    """Update n of the warm-up uses (n + 1) / W of the peak."""
    got = [at(step, schedule=schedule) for step in range(WARMUP)]
    np.testing.assert_allclose(got, [PEAK * (step + 1) / WARMUP for step in range(WARMUP)], rtol=1e-6)


def cosine(step: int) -> float:
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def linear(step: int) -> float:
    return PEAK + (FLOOR - PEAK) * (step - WARMUP) / (STEPS - WARMUP)


def wsd(step: int) -> float:
    return PEAK if step < 75 else PEAK + (FLOOR - PEAK) * (step - 75) / 25


@pytest.mark.parametrize("expected", [cosine, linear, wsd])
@pytest.mark.parametrize("step", [WARMUP, WARMUP + 1, 55, 74, 76, STEPS - 1, STEPS])
def test_after_warm_up(expected, step):
    np.testing.assert_allclose(
        at(step, schedule=expected.__name__, decay_fraction=0.25), expected(step), rtol=2e-6, atol=1e-9
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_beyond_the_end_it_stays_at_the_floor(schedule):
    for step in (STEPS, STEPS + 1, 10 * STEPS):
        np.testing.assert_allclose(at(step, schedule=schedule), FLOOR, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_without_warm_up_it_begins_at_the_peak(schedule):
    rate = learning_rate(OptimizerConfig(lr=PEAK, warmup_steps=0, schedule=schedule), STEPS)
    np.testing.assert_allclose(float(rate(0)), PEAK, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (5, 5), (10, 9)])
def test_short_runs_keep_to_the_rules(schedule, steps, warmup):
    """Never above the peak or below the first warm-up step, and at the floor when all steps are done."""
    cfg = OptimizerConfig(lr=PEAK, warmup_steps=warmup, schedule=schedule, decay_fraction=0.5)
    rate = learning_rate(cfg, steps)
    values = [float(rate(step)) for step in range(steps)]
    assert max(values) <= PEAK * (1 + 1e-6) and min(values) >= min(FLOOR, PEAK / max(warmup, 1)) * (1 - 1e-6)
    if steps > warmup:
        np.testing.assert_allclose(float(rate(steps)), FLOOR, rtol=1e-6)
