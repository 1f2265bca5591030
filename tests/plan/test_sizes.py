"""The ladder of sizes, and which of them a budget is best spent on."""

from dataclasses import replace

import pytest

from podling.config import Config
from podling.errors import InputError
from podling.plan.sizes import LADDER, candidates, learning_rate, rank_sizes
from podling.plan.target import parse_target
from podling.presets import PRESETS
from podling.train.flops import flops_per_token
from podling.validate import validate

TARGET = parse_target("v5e-8")


def base(vocab_size: int = 50257) -> Config:
    config = PRESETS["gpt2"].config
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def seconds(sizes, flops_per_s: float) -> dict[str, float]:
    """Of a step, on devices that reach this."""
    return {one.name: flops_per_token(one.config.model) * one.config.train.batch_tokens / flops_per_s for one in sizes}


def test_the_ladder_climbs_and_its_names_are_its_parameters():
    sizes = candidates(base())
    params = [one.params for one in sizes]
    assert params == sorted(params) and [one.name for one in sizes] == list(LADDER)
    for one, more in zip(params, params[1:], strict=False):
        assert 1.3 < more / one < 1.9
    for one in sizes:
        assert validate(one.config) == []
        if one.name in PRESETS:
            ours, preset = one.config, PRESETS[one.name].config
            assert replace(ours.model, vocab_size=0) == preset.model and ours.optimizer == preset.optimizer
            assert ours.train.remat == preset.train.remat
        else:
            assert one.name == f"gpt2-{round(one.params / 1e6)}m"


def test_what_was_given_stays():
    given = replace(base(), optimizer=replace(base().optimizer, lr=1e-3), train=replace(base().train, remat="dots"))
    for one in candidates(given, {"--lr", "--train.remat"}):
        assert one.config.optimizer.lr == 1e-3 and one.config.train.remat == "dots"
    assert {one.config.optimizer.lr for one in candidates(given)} != {1e-3}


def test_learning_rates_go_down_as_models_grow():
    rates = [learning_rate(one.params) for one in candidates(base())]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 6e-4 and learning_rate(354_823_168) == 3e-4
    assert learning_rate(210_000_000) == pytest.approx((6e-4 * 3e-4) ** 0.5, rel=0.02)  # in the middle of the two
    assert learning_rate(10**10) == 2e-4


def test_more_time_buys_a_larger_model():
    sizes = candidates(base())
    best = []
    for hours in (1, 9, 100, 2000):
        ranked = rank_sizes(sizes, seconds(sizes, 6e14), TARGET, hours * 3600, {}, None)
        losses = [one.law_loss for one in ranked if one.law_loss is not None]
        assert losses == sorted(losses)
        assert all(one.law_loss is None for one in ranked[len(losses) :])  # in an hour, the largest see too few tokens
        best.append(ranked[0].candidate.params)
    assert best == sorted(set(best))


def test_the_best_is_near_what_the_law_says_is_best():
    """For 6 N D operations its optimum has a closed form: N = G (C / 6)^(beta / (alpha + beta))."""
    sizes, flops_per_s, budget_s = candidates(base()), 6e14, 9 * 3600
    best = rank_sizes(sizes, seconds(sizes, flops_per_s), TARGET, budget_s, {}, None)[0]
    ratio = (0.3478 * 482.01 / (0.3658 * 2085.43)) ** (1 / (0.3478 + 0.3658))
    optimum = ratio * (flops_per_s * budget_s / 6) ** (0.3658 / (0.3478 + 0.3658))
    assert optimum / 1.8 < best.candidate.params < optimum * 1.8
    assert best.loss_range is not None and best.loss_range[0] <= best.law_loss <= best.loss_range[1]


def test_repeating_little_text_calls_for_a_smaller_model_than_new_text():
    sizes = candidates(base())
    plenty, little = (
        rank_sizes(sizes, seconds(sizes, 6e14), TARGET, 9 * 3600, {}, tokens)[0] for tokens in (10**11, 10**9)
    )
    assert little.law_loss > plenty.law_loss + 0.1 and little.use.epochs > 5
    assert little.candidate.params < plenty.candidate.params


def test_no_size_reads_its_data_more_than_forty_times():
    """Smaller models are faster: without a limit they would be left out, and the slowest chosen."""
    sizes, data_tokens = candidates(base()), 10**8
    ranked = rank_sizes(sizes, seconds(sizes, 6e14), TARGET, 9 * 3600, {}, data_tokens)
    assert all(one.use.epochs <= 40 and one.law_loss is not None for one in ranked)
    assert len({one.use.tokens for one in ranked[:3]}) == 1 and ranked[0].use.epochs > 39.5
    longer = rank_sizes(sizes, seconds(sizes, 6e14), TARGET, 90 * 3600, {}, data_tokens)
    assert longer[0].use.tokens == ranked[0].use.tokens  # ten times the time buys no more
    alike = [one for one in ranked if round(one.law_loss, 3) == round(ranked[0].law_loss, 3)]
    assert len(alike) > 1 and ranked[0].use.train_s <= 1.2 * min(one.use.train_s for one in alike)


def test_a_warm_up_that_was_typed_must_fit_the_run():
    sizes = candidates(base())
    typed = [
        replace(one, config=replace(one.config, optimizer=replace(base().optimizer, warmup_steps=10**7)))
        for one in sizes
    ]
    with pytest.raises(InputError, match="that the budget has time for"):
        rank_sizes(typed, seconds(sizes, 6e14), TARGET, 3600, {}, None, {"--optimizer.warmup-steps"})


def test_sizes_without_a_time_are_left_out_and_compile_times_count():
    sizes = candidates(base())
    times = seconds(sizes, 6e14)
    ranked = rank_sizes(sizes, {"gpt2": times["gpt2"]}, TARGET, 9 * 3600, {"gpt2": 3600.0}, None)
    assert [one.candidate.name for one in ranked] == ["gpt2"]
    assert ranked[0].use.compile_s == pytest.approx(4800)


@pytest.mark.parametrize(
    ("vocab_size", "budget_s", "data_tokens", "where", "words"),
    [
        (2048, 32400, None, "--model", "vocabulary of 2,048"),
        (50257, 32400, 10**6, "--model", "1.0M tokens of text, read 40 times (more often brings nothing), come to 40M"),
        (50257, 230, 10**9, "--model", "the budget has time for 144M tokens with gpt2-27m"),
        (50257, 60, None, "--budget", "too short"),
    ],
)
def test_when_none_can_be_chosen(vocab_size, budget_s, data_tokens, where, words):
    sizes = candidates(base(vocab_size))
    with pytest.raises(InputError) as error:
        rank_sizes(sizes, seconds(sizes, 6e14), TARGET, budget_s, {}, data_tokens)
    assert error.value.problems[0].where == where and words in str(error.value)
