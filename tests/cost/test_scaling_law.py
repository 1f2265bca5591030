"""The law against public runs, and where it is silent."""

import math

import pytest

from podling.cost.scaling_law import RUNS, forecast, law, misses, useful, worth

GPT2 = 124_439_808


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} {run.tokens / 1e9:g}B")
def test_public_runs_end_within_the_range(run):
    (low, high), words = forecast(run.params, run.tokens, None, 50257)
    assert low <= run.loss <= high
    assert f"{law(run.params, run.tokens):.2f} by the law" in words and "Besiroglu" in words


def test_the_law_by_hand():
    """1.8172 + 482.01 / 653.7 + 2085.43 / 4550.2, the powers from tables of logarithms."""
    assert law(GPT2, 1e10) == pytest.approx(1.8172 + 0.7374 + 0.4583, abs=3e-4)


def test_the_best_size_for_a_lot_of_compute_sees_about_twenty_tokens_a_parameter():
    """What Besiroglu et al. find to agree with Hoffmann et al.'s other two methods, and the first fit did not."""
    flops = 5.76e23  # Chinchilla's own budget: 70e9 parameters, 1.4e12 tokens
    best = min((law(round(n * 1e9), flops / (6e9 * n)), n) for n in range(10, 200))[1]
    assert flops / (6e9 * best) / (best * 1e9) == pytest.approx(20, rel=0.3)


def test_the_range_is_what_the_law_missed_by_and_no_wider():
    missed = [run.loss - law(run.params, run.tokens) for run in RUNS]
    low, high = misses(5e8)
    assert low == pytest.approx(min(missed), abs=0.05) and high == pytest.approx(max(missed), abs=0.05)
    assert misses(5e9)[0] == 0 and misses(5e9)[1] == high  # with tokens enough, no public run ended below


def test_repeated_tokens_count_for_less():
    assert worth(1e9, None) == worth(1e9, 1) == worth(1e9, 0.3) == 1e9
    assert worth(4e9, 4) == pytest.approx(4e9, rel=0.08)  # "up to 4 epochs almost as good as new"
    assert worth(1e15, 1e6) == pytest.approx(1e9 * 16.387756)  # and never more than that
    assert law(10**7, 1e10, 20) == pytest.approx(law(10**7, 5e8 * (1 + 15.387756 * (1 - math.exp(-19 / 15.387756)))))
    once, often = forecast(GPT2, 1e10, 1, 50257), forecast(GPT2, 1e10, 20, 50257)
    assert often[0][0] > once[0][0] + 0.05
    assert "20.0 epochs count as 11." in often[1] and "Muennighoff" not in once[1]


def test_parameters_beyond_what_repeated_text_calls_for_count_for_less():
    """500M tokens call for 18.1M parameters: where another parameter and another token gain the same."""
    best = 18.1e6
    slope = [0.3478 * 482.01 * best**-0.3478, 0.3658 * 2085.43 * 5e8**-0.3658]
    assert slope[0] == pytest.approx(slope[1], rel=0.002)
    assert useful(GPT2, 1e10, None) == useful(GPT2, 1e10, 1) == GPT2
    assert useful(best, 1e10, 20) == pytest.approx(best, rel=0.01)
    assert useful(1.2 * best, 1e10, 20) == pytest.approx(1.2 * best, rel=0.03)
    assert useful(1e12, 1e10, 20) == pytest.approx(best * 6.31, rel=0.01)
    assert useful(GPT2, 1e11, 2) == GPT2  # fewer than its text calls for


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((GPT2, 1e10, None, 2048), "vocabulary of 2,048"),
        ((2_200_000, 1e10, None, 50257), "models this small (2.2M parameters"),
        ((GPT2, 1e8, None, 50257), "so few tokens (100M"),
        ((GPT2, 1e10, 3000, 50257), "3,000 epochs"),
    ],
)
def test_where_no_law_holds_it_says_so(args, words):
    found, why = forecast(*args)
    assert found is None and words in why and "no law holds" in why
