"""From the compiler's cycles to seconds: one factor per chip, fitted to steps that were measured in public.

The TPU compiler writes an estimate in cycles beside every operation. It ranks operations well and is steadily too slow.
`docs/calibration.md` has the measurements, the programs and the error of each; `bench/calibration/run.py` repeats the fit.
No JAX.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """How a chip's predicted step is corrected, and how far off it may still be."""

    factor: float  # multiplies cycles / clock; an operation is never faster than its floors, whatever the factor
    low: float  # a step has taken, or may take, this times the predicted step at best ...
    high: float  # ... and this times at worst: the range is (step_s * low, step_s * high)
    words: str  # how sure it is, for people


FACTORS = {"v3": 0.75, "v5e": 0.67, "v6e": 0.8}


def calibration(chip_name: str) -> Calibration:
    """The factor for a chip, with the range in which steps may lie.

    Args:
        chip_name: a key of `podling.chips.CHIPS`.
    """
    if chip_name in FACTORS:
        return Calibration(FACTORS[chip_name], 0.8, 1.25, f"calibrated on {chip_name}")
    return Calibration(0.74, 0.6, 1.6, f"uncalibrated: no step on {chip_name} was measured in public")
