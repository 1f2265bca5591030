"""Fit the factor from the compiler's cycles to seconds to steps measured in public; print how far off it is.

    pip install -e '.[tpu]'                             # Linux; no TPU is needed
    python bench/calibration/run.py                     # all programs, 1 to 4 minutes each: docs/calibration.md
    python bench/calibration/run.py --only tpuchat
    python bench/calibration/run.py --keep FOLDER       # keep compiled programs there, and take those that are there
    python bench/calibration/run.py --json

For every program: the factor at which the predicted step takes as long as the measured one. A chip's factor is the
geometric mean of its programs'. What is printed as an error is predicted / measured - 1.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podling.chips import CHIPS
from podling.cost.calibration import MEASURED, Measured, chip_factor, shared_factor
from podling.cost.step_time import step_time
from podling.hlo.program import read_program
from podling.topology import compiler_environment, parse_topology

HERE = Path(__file__).parent
FACTORS = (0.0, 2.0)  # between which the fit looks
KERNEL_SHARE = 0.5  # of the peak that custom kernels are taken to reach


@dataclass(frozen=True)
class Fitted:
    """A measured program and what is predicted of it."""

    measured: Measured
    predict: Callable[[float], float]  # factor -> step_s
    factor: float | None  # None: floors alone take longer than what was measured

    def error(self, factor: float) -> float:
        """Positive where the prediction is too slow."""
        return self.predict(factor) / self.measured.step_s - 1


def compiled(name: str, folder: Path) -> str:
    """The optimised program of a case, compiled in a process of its own unless it lies in the folder."""
    path = folder / f"{name.replace(' ', '_')}.hlo"
    if not path.exists():
        environment = {**os.environ, **compiler_environment()}
        subprocess.run([sys.executable, str(HERE / "compiler.py"), name, str(path)], env=environment, check=True)
    return path.read_text()


def solve(predict: Callable[[float], float], step_s: float) -> float | None:
    """The factor at which the prediction is `step_s`, to 1e-3."""
    low, high = FACTORS
    if predict(low) >= step_s:
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if predict(middle) < step_s else (low, middle)
    return (low + high) / 2


def fit(name: str, folder: Path) -> Fitted:
    from cases import CASES  # imports JAX

    case = next(case for case in CASES if case.name == name)
    measured = next(measured for measured in MEASURED if measured.name == name)
    program, chip = read_program(compiled(name, folder)), CHIPS[measured.chip]
    topology = parse_topology(case.topology)
    kernels_s = case.kernel_flops / chip.peak_flops["bfloat16"] / KERNEL_SHARE
    seen: dict[float, float] = {}

    def predict(factor: float) -> float:
        if factor not in seen:
            seen[factor] = step_time(program, chip, case.mesh, topology, factor=factor).step_s + kernels_s
        return seen[factor]

    return Fitted(measured, predict, solve(predict, measured.step_s))


def without(fits: Sequence[Fitted], left_out: Callable[[Fitted], bool]) -> dict[str, list[float]]:
    """Fitted factors by chip, without some."""
    found: dict[str, list[float]] = {}
    for one in fits:
        if one.factor and one.measured.counts and not left_out(one):
            found.setdefault(one.measured.chip, []).append(one.factor)
    return found


def table(fits: Sequence[Fitted]) -> list[dict[str, object]]:
    """A row for every program: its own factor, and the error under three honest ways of choosing another."""
    rows = []
    for one in fits:
        chip = one.measured.chip
        others = without(fits, lambda other, chip=chip: other.measured.chip == chip)
        own = without(fits, lambda _: False).get(chip)
        rest = without(fits, lambda other, one=one: other is one).get(chip)
        shared = shared_factor(others) if others else None
        rows.append(
            {
                "name": one.measured.name,
                "chip": chip,
                "counts": one.measured.counts,
                "measured_s": one.measured.step_s,
                "raw_s": one.predict(1.0),
                "floors_s": one.predict(0.0),
                "factor": one.factor,
                "shared_factor": shared,
                "error_shared": one.error(shared) if shared else None,
                "chip_factor": chip_factor(own) if own else None,
                "predicted_s": one.predict(chip_factor(own)) if own else None,
                "error_chip": one.error(chip_factor(own)) if own else None,
                "error_left_out": one.error(chip_factor(rest)) if rest else None,
                "left_out_s": one.predict(chip_factor(rest)) if rest else None,
                "shared_s": one.predict(shared) if shared else None,
            }
        )
    return rows


def show(rows: Sequence[dict[str, object]]) -> str:
    """As Markdown."""

    def cell(value: object, form: str) -> str:
        return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, form)

    lines = [
        "| program | measured, ms | raw, ms | factor | shared, this chip left out | the chip's factor "
        "| others of the chip |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = f"{cell(row['measured_s'] * 1e3, '.1f')} | {cell(row['raw_s'] * 1e3, '.1f')}"  # type: ignore[operator]
        shared = f"{cell(row['shared_factor'], '.2f')}: {cell(row['error_shared'], '+.0%')}"
        own = f"{cell(row['chip_factor'], '.2f')}: {cell(row['error_chip'], '+.0%')}"
        name = row["name"] if row["counts"] else f"({row['name']})"
        last = cell(row["error_left_out"], "+.0%")
        lines.append(f"| {name} | {times} | {cell(row['factor'], '.3f')} | {shared} | {own} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--keep", type=Path, help="folder of compiled programs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        fits = []
        for measured in MEASURED:
            if given.only in measured.name:
                print(f"{measured.name} ...", file=sys.stderr, flush=True)
                fits.append(fit(measured.name, folder))
        rows = table(fits)
    print(json.dumps(rows, indent=1) if given.json else show(rows))


if __name__ == "__main__":
    main()
