"""From the compiler's cycles to seconds: one factor per chip, fitted to steps that were measured in public.

The TPU compiler writes an estimate in cycles beside every operation. It ranks operations well and is steadily too slow.
`bench/calibration/` rebuilds the programs below from their published settings, compiles them and finds the factor at
which the predicted step takes as long as the measured one; `docs/calibration.md` has the tables. No JAX.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """How a chip's predicted step is corrected, and how far off it may still be."""

    factor: float  # multiplies cycles / clock; an operation is never faster than its floors, whatever the factor
    low: float  # a step takes this times the predicted one at best ...
    high: float  # ... and this times at worst: the range is (step_s * low, step_s * high)
    basis: str  # what it rests on, for people

    @property
    def words(self) -> str:
        """How sure a predicted step is."""
        return give_or_take(self.basis, self.high)


@dataclass(frozen=True)
class Measured:
    """A step that somebody timed on TPUs, of a program whose settings are published."""

    name: str  # of its stand-in in `bench/calibration/cases.py`
    chip: str
    step_s: float
    source: str
    factor: float | None = None  # at which the predicted step takes step_s; None where floors alone take longer
    predicted_s: float | None = None  # with the factor of its chip
    left_out_s: float | None = None  # with the factor of its chip's other programs; None where there are none
    shared_s: float | None = None  # with one factor of all other chips
    counts: bool = True  # False: shown, but no factor is fitted to it


GOOGLE = "Google, Train a GPT2 model with JAX on TPU for free (developers.googleblog.com, 2025)"
TPUCHAT = "github.com/vorushin/tpuchat: LOG.md; vorushin.github.io/blog/llm-pretraining-tpu-v6e-50usd"
NOR = "nor-blog.pages.dev/posts/2025-08-21-modded-nanogpt-jax: records/sub10m.txt"
MAXTEXT = "github.com/AI-Hypercomputer/maxtext: configs/{v4,v5e,v5p}/README.md"
MEASURED = (  # the figures after the source are printed by bench/calibration/run.py
    Measured("notebook v3-8", "v3", 0.2545, GOOGLE, 0.792, 0.2545, None, 0.2601),
    Measured("notebook with dropout v3-8", "v3", 0.2545, GOOGLE, 0.548, 0.2945, 0.2945, 0.304, counts=False),
    Measured("tpuchat v5e-1", "v5e", 131072 / 148829, TPUCHAT, 0.803, 0.8585, 0.841, 0.8992),
    Measured("maxtext 16B v5e-256", "v5e", 10.06, MAXTEXT, 0.599, 10.38, 10.93, 11.43),
    Measured("tpuchat v6e-1", "v6e", 131072 / 433606, TPUCHAT, 0.853, 0.3031, 0.3034, 0.2938),
    Measured("modded-nanogpt 1024 v6e-8", "v6e", 0.3069, NOR, 0.990, 0.2729, 0.2598, 0.2646),
    Measured("modded-nanogpt 2048 v6e-8", "v6e", 0.4233, NOR, 0.742, 0.4629, 0.4879, 0.4489),
    Measured("maxtext 32B v5p-128", "v5p", 7.238, MAXTEXT, None, None, None, 8.527, counts=False),
    Measured("maxtext 22B v4-128", "v4", 23.29, MAXTEXT, 0.998, 23.3, None, 20.65),
)

LEAST_MISS = math.log(1.15)
"""What one setting that is not known for sure moves a stand-in by (dropout in the notebook)."""
UNCALIBRATED = 1.25
"""How much wider the range is of a chip without measurement than the worst miss when a chip is left out."""


def chip_factor(factors: Iterable[float]) -> float:
    """One factor from those of a chip's programs: their geometric mean, so that ratios up and down weigh alike."""
    logs = [math.log(factor) for factor in factors]
    return math.exp(math.fsum(logs) / len(logs))


def shared_factor(by_chip: Mapping[str, Iterable[float]]) -> float:
    """One factor for all chips, each chip weighing the same however many programs ran on it."""
    return chip_factor(chip_factor(factors) for factors in by_chip.values())


def fitted(chip_name: str = "") -> list[Measured]:
    """What the factor of a chip, or of all, is fitted to."""
    return [one for one in MEASURED if one.counts and one.factor and chip_name in ("", one.chip)]


def _miss(one: Measured, predicted_s: float | None) -> float:
    return abs(math.log(one.step_s / predicted_s)) if predicted_s else 0.0


def calibration(chip_name: str) -> Calibration:
    """The factor for a chip, with the range in which steps may lie.

    The range is the worst miss of a program whose own measurement was left out, predicted from its chip's other
    programs or, where there is none, from the other chips. A chip without a fitted step gets one factor for all and a
    range wider than the worst miss when a chip is left out.

    Args:
        chip_name: a key of `podling.chips.CHIPS`.
    """
    own, everything = fitted(chip_name), fitted()
    new_program = [_miss(one, one.left_out_s) for one in everything]
    new_chip = [_miss(one, one.shared_s) for one in everything]
    if own:
        alone = [_miss(one, one.shared_s) for one in own if one.left_out_s is None]
        miss = max(LEAST_MISS, *new_program, *alone)
        steps = "one step" if len(own) == 1 else f"{len(own)} steps"
        return _given(own, miss, f"calibrated on {steps} measured on {chip_name}")
    miss = UNCALIBRATED * max(LEAST_MISS, *new_program, *new_chip)
    return _given(everything, miss, f"uncalibrated: no factor could be fitted to a step on {chip_name}")


def give_or_take(basis: str, high: float) -> str:
    """How sure a step is whose worst is `high` times what is predicted; its best is as much less, as a factor."""
    return f"{basis}, give or take {high - 1:.0%}"


def _given(on: Iterable[Measured], miss: float, basis: str) -> Calibration:
    by_chip: dict[str, list[float]] = {}
    for one in on:
        by_chip.setdefault(one.chip, []).append(one.factor or 1.0)
    return Calibration(shared_factor(by_chip), math.exp(-miss), math.exp(miss), basis)
