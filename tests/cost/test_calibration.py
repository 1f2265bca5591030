"""The factor from cycles to seconds follows from the evidence beside it, and the fit finds a known answer."""

import re
from pathlib import Path

import pytest

from podling.chips import CHIPS
from podling.cost.calibration import MEASURED, Measured, calibration, chip_factor, shared_factor

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "calibration"
MEASURED_CHIPS = sorted({one.chip for one in MEASURED if one.counts and one.factor})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins can be imported, as they can where they are run."""
    monkeypatch.syspath_prepend(str(BENCH))


def counted(chip: str) -> list[Measured]:
    return [one for one in MEASURED if one.chip == chip and one.counts and one.factor]


@pytest.mark.parametrize("chip", MEASURED_CHIPS)
def test_a_chips_factor_is_the_geometric_mean_of_its_programs(chip: str):
    product = 1.0
    for one in counted(chip):
        product *= one.factor or 0.0
    assert calibration(chip).factor == pytest.approx(product ** (1 / len(counted(chip))), rel=1e-9)


@pytest.mark.parametrize("one", [one for one in MEASURED if one.counts and one.factor], ids=lambda one: one.name)
def test_every_measured_step_lies_in_the_range_that_is_printed(one: Measured):
    given = calibration(one.chip)
    assert one.predicted_s * given.low <= one.step_s <= one.predicted_s * given.high


def test_a_chip_without_measurement_says_so_and_its_range_is_wider():
    for chip in set(CHIPS) - set(MEASURED_CHIPS):
        unknown = calibration(chip)
        assert "uncalibrated" in unknown.words and chip in unknown.words
        for known in map(calibration, MEASURED_CHIPS):
            assert "uncalibrated" not in known.words
            assert unknown.low < known.low and unknown.high > known.high


def test_a_chip_with_many_programs_weighs_as_much_as_one_with_few():
    assert chip_factor([0.5, 2.0]) == pytest.approx(1.0)
    assert shared_factor({"a": [0.5] * 9, "b": [2.0]}) == pytest.approx(1.0)


def test_every_measurement_names_a_chip_and_a_stand_in_once(bench: None):
    names = [one.name for one in MEASURED]
    assert len(set(names)) == len(names)
    assert all(one.chip in CHIPS and one.step_s > 0 and one.source for one in MEASURED)
    cases = re.findall(r'^ +"?(?:[Cc]ase|chat|pod)\(\s*"([^"]+)"', (BENCH / "cases.py").read_text(), re.MULTILINE)
    assert sorted(cases) == sorted(names)


def test_stand_ins_have_the_published_number_of_parameters(bench: None):
    import jax

    def size(tree: object) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    import gpt2_notebook
    import tpuchat

    assert size(gpt2_notebook.parameters()) == 124_439_808
    assert round(size(tpuchat.parameters()) / 1e6, 1) == 163.6


def test_the_fit_finds_the_factor_of_a_known_step(bench: None):
    from run import solve

    assert solve(lambda factor: 0.25 + 0.5 * factor, 0.6) == pytest.approx(0.7, abs=1e-3)
    assert solve(lambda factor: max(0.3, 0.5 * factor), 0.45) == pytest.approx(0.9, abs=1e-3)
    assert solve(lambda factor: max(0.3, 0.5 * factor), 0.2) is None


def test_the_page_shows_the_numbers_in_use():
    page = (ROOT / "docs" / "calibration.md").read_text()
    for one in MEASURED:
        row = next(line for line in page.splitlines() if f"| {one.name} |" in line or f"| ({one.name}) |" in line)
        assert f"| {one.step_s * 1e3:.1f} |" in row
        assert one.factor is None or f"| {one.factor:.3f} |" in row
