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
    words: str  # how sure it is, for people


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
V5P = "github.com/TaiMingLu/modded-nanogpt-jax: MULTIHOST_TPU_GUIDE.md (the same program)"
MAXTEXT = "github.com/AI-Hypercomputer/maxtext: configs/{v4,v5e,v5p}/README.md"
TOKENS = 131072  # a step of tpuchat's

MEASURED = (
    Measured("notebook v3-8", "v3", 0.2545, GOOGLE, 0.791),
    Measured("notebook with dropout v3-8", "v3", 0.2545, GOOGLE, counts=False),
    Measured("tpuchat v5e-1", "v5e", TOKENS / 148829, TPUCHAT, 0.803),
    Measured("maxtext 16B v5e-256", "v5e", 10.06, MAXTEXT),
    Measured("tpuchat v6e-1", "v6e", TOKENS / 433606, TPUCHAT, 0.852),
    Measured("tpuchat halved loss v6e-1", "v6e", 0.275, TPUCHAT),
    Measured("tpuchat 3 heads, 16 x 4 rows v6e-1", "v6e", TOKENS / 464234, TPUCHAT),
    Measured("tpuchat 3 heads, 4 rows v6e-1", "v6e", 8192 / 415319, TPUCHAT),
    Measured("tpuchat 3 heads, 16 rows v6e-1", "v6e", 32768 / 386769, TPUCHAT),
    Measured("modded-nanogpt 1024 v6e-8", "v6e", 0.3069, NOR, 0.988),
    Measured("modded-nanogpt 2048 v6e-8", "v6e", 0.4233, NOR),
    Measured("modded-nanogpt 1024 v5p-16", "v5p", 0.40, V5P),
    Measured("modded-nanogpt 2048 v5p-16", "v5p", 0.45, V5P),
    Measured("maxtext 32B v5p-128", "v5p", 8.44, MAXTEXT),
    Measured("maxtext 22B v4-128", "v4", 1.0, MAXTEXT),
)

LEAST_MISS = math.log(1.25)
"""Closer than a tenth nobody measured twice: other versions of the compiler, the host's work between steps."""
UNCALIBRATED = 1.25
"""How much wider the range is of a chip without measurement than the worst miss when a chip is left out."""


def chip_factor(factors: Iterable[float]) -> float:
    """One factor from those of a chip's programs: their geometric mean, so that ratios up and down weigh alike."""
    logs = [math.log(factor) for factor in factors]
    return math.exp(math.fsum(logs) / len(logs))


def shared_factor(by_chip: Mapping[str, Iterable[float]]) -> float:
    """One factor for all chips, each chip weighing the same however many programs ran on it."""
    return chip_factor(chip_factor(factors) for factors in by_chip.values())


def fitted(chip_name: str | None = None) -> list[Measured]:
    """What the factor of a chip, or of all, is fitted to."""
    return [one for one in MEASURED if one.counts and one.factor and chip_name in (None, one.chip)]


def _miss(one: Measured, predicted_s: float | None) -> float:
    return abs(math.log(one.step_s / predicted_s)) if predicted_s else 0.0


def calibration(chip_name: str) -> Calibration:
    """The factor for a chip, with the range in which steps may lie.

    The range is the worst miss when a program's own measurement is left out: predicted from the chip's other
    programs or, where there is only one, from the other chips. A chip that nobody measured gets one factor for all
    and a range wider than the worst miss when a chip is left out.

    Args:
        chip_name: a key of `podling.chips.CHIPS`.
    """
    own = fitted(chip_name)
    if own:
        miss = max(LEAST_MISS, *(_miss(one, one.left_out_s or one.shared_s) for one in own))
        steps = "one public step" if len(own) == 1 else f"{len(own)} public steps"
        words = f"calibrated on {steps} on {chip_name}; the worst miss was {math.exp(miss) - 1:.0%}"
        return Calibration(chip_factor(one.factor for one in own if one.factor), math.exp(-miss), math.exp(miss), words)
    everything = fitted()
    misses = (max(_miss(one, one.shared_s), _miss(one, one.left_out_s)) for one in everything)
    miss = UNCALIBRATED * max(LEAST_MISS, *misses)
    by_chip = {one.chip: [other.factor for other in fitted(one.chip) if other.factor] for one in everything}
    words = f"uncalibrated: no step on {chip_name} was measured in public, the factor is that of other chips"
    return Calibration(shared_factor(by_chip), math.exp(-miss), math.exp(miss), words)
