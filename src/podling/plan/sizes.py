"""Which model size to train in a budget: a ladder of GPT-2s, ranked by the loss that a scaling law gives each.

A larger model learns more from a token and sees fewer of them, so for every budget one size ends lowest.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from podling.config import Config
from podling.cost.scaling_law import LEAST_TOKENS, MOST_EPOCHS, forecast, law
from podling.errors import InputError, Problem
from podling.plan.budget import spend, within
from podling.plan.records import BudgetUse
from podling.plan.target import Target
from podling.presets import PRESETS

LADDER = {  # layers, heads, embed; heads of 64, as GPT-2's
    "gpt2-27m": (4, 6, 384),
    "gpt2-45m": (6, 8, 512),
    "gpt2-72m": (8, 10, 640),
    "gpt2": (12, 12, 768),
    "gpt2-200m": (16, 14, 896),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-505m": (28, 18, 1152),
    "gpt2-large": (36, 20, 1280),
    "gpt2-1025m": (40, 22, 1408),
    "gpt2-xl": (48, 25, 1600),
}
"""GPT-2's four sizes, and others below and between them, named by their parameters with GPT-2's vocabulary."""


@dataclass(frozen=True)
class Candidate:
    """A size of the ladder as a configuration."""

    name: str
    config: Config
    params: int


@dataclass(frozen=True)
class Ranked:
    """A size, and where the budget takes it."""

    candidate: Candidate
    step_s: float
    use: BudgetUse
    law_loss: float | None
    """By the law alone, which is what sizes are ranked by; None where none holds."""
    loss_range: tuple[float, float] | None
    words: str


def candidates(base: Config, given: Collection[str] = ()) -> tuple[Candidate, ...]:
    """Every size of the ladder, smallest first, with all else as in `base`.

    Args:
        base: of GPT-2's family, with `vocab_size` known.
        given: flags that the person typed: remat and the learning rate follow the size only where they are not among
            them.
    """
    from podling.model.spec import param_count  # imports JAX

    found = []
    for name, (layers, heads, embed) in LADDER.items():
        # A size between two presets is written as the smaller one's preset and the flags that differ.
        preset = name if name in PRESETS else _preset_below(embed)
        model = replace(base.model, preset=preset, layers=layers, heads=heads, embed=embed, mlp=4 * embed)
        params, config = param_count(model), replace(base, model=model)
        if "--lr" not in given:
            config = replace(config, optimizer=replace(config.optimizer, lr=learning_rate(params)))
        if "--train.remat" not in given:
            config = replace(config, train=replace(config.train, remat=PRESETS[preset].config.train.remat))
        found.append(Candidate(name, config, params))
    return tuple(found)


def _preset_below(embed: int) -> str:
    names = [name for name, (_, _, size) in LADDER.items() if name in PRESETS and size <= embed]
    return names[-1] if names else "gpt2"


def learning_rate(params: int) -> float:
    """Peak learning rate for a size: the presets' own, in between on the line through their logarithms.

    Below the smallest it stays as it is: GPT-3's table, where those come from, begins there.
    """
    known = [(size, PRESETS[name].config.optimizer.lr) for name, size in _PRESET_PARAMS.items()]
    if params <= known[0][0]:
        return known[0][1]
    for (less, high), (more, low) in pairwise(known):
        if params <= more:
            along = math.log(params / less) / math.log(more / less)
            return float(f"{high * (low / high) ** along:.2g}")
    return known[-1][1]


_PRESET_PARAMS = {  # Radford et al. 2019, table 2, counted
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


def rank_sizes(
    sizes: Sequence[Candidate],
    step_s: Mapping[str, float],
    target: Target,
    budget_s: float,
    compile_s: Mapping[str, float | None],
    data_tokens: int | None,
    given: Collection[str] = (),
) -> list[Ranked]:
    """The sizes by the loss they should end with, lowest first; those of which no law speaks last.

    Of sizes that come to the same the one that trains in clearly less time is first. None reads its data more often
    than `most_steps` lets it, though there be time.

    Args:
        sizes: of `candidates`.
        step_s: seconds of a step of each by name; a size that is not there (it does not fit) is left out.
        target: the devices.
        budget_s: seconds of the session.
        compile_s: of each by name; a size that is not there has not been compiled.
        data_tokens: training tokens there are; None when that is not known.
        given: the flags that the person typed: a warm-up that is among them must fit the run.

    Raises:
        InputError: the budget is too short for every one of them, or no law holds for any.
    """
    ranked, too_short = [], None
    for one in sizes:
        if one.name not in step_s:
            continue
        try:
            most = most_steps(one.config, data_tokens)
            use = spend(one.config, target, step_s[one.name], compile_s.get(one.name), budget_s, data_tokens, most)
            within(one.config, use, given)
        except InputError as error:
            too_short = too_short or error
            continue
        found, words = forecast(one.params, use.tokens, use.epochs, one.config.model.vocab_size)
        expected = law(one.params, use.tokens, use.epochs) if found else None
        ranked.append(Ranked(one, step_s[one.name], use, expected, found, words))
    if not ranked and too_short:
        raise too_short
    if all(one.law_loss is None for one in ranked):
        raise InputError(_no_law(max(ranked, key=lambda one: one.use.tokens), data_tokens))
    return sorted(ranked, key=_order)


def _order(one: Ranked) -> tuple[float, float, float]:
    """By the law, to as many places as are shown; on little text many sizes come to the same, and some end sooner."""
    expected, time_share = math.inf if one.law_loss is None else one.law_loss, one.use.train_s / one.use.budget_s
    return round(expected, 3), round(time_share, 1), expected


def most_steps(config: Config, data_tokens: int | None) -> int | None:
    """Steps after which the data has been seen so often that more would bring nothing; None where nothing tells."""
    return max(1, MOST_EPOCHS * data_tokens // config.train.batch_tokens) if data_tokens else None


def _no_law(most: Ranked, data_tokens: int | None) -> Problem:
    """Why no law tells the sizes apart, from the one that sees the most tokens."""
    name, tokens, fix = most.candidate.name, most.use.tokens, "give a size, for example --model gpt2"
    vocab_size = most.candidate.config.model.vocab_size
    found, words = forecast(most.candidate.params, max(tokens, LEAST_TOKENS), most.use.epochs, vocab_size)
    if found is None:  # not only for want of tokens
        return Problem("--model", f"no size can be chosen: {words}", fix)
    least = f"no law tells the loss of fewer than {LEAST_TOKENS / 1e6:.0f}M"
    if data_tokens and most.use.steps == most_steps(most.candidate.config, data_tokens):
        what = f"{data_tokens / 1e6:.1f}M tokens of text, read {MOST_EPOCHS} times (more often brings nothing)"
        what, fix = f"{what}, come to {tokens / 1e6:.0f}M tokens", f"give more text, or {fix.removeprefix('give ')}"
    else:
        what = f"the budget has time for {tokens / 1e6:.0f}M tokens with {name}, less with the larger sizes"
        fix = f"a longer --budget, or {fix.removeprefix('give ')}"
    return Problem("--model", f"no size can be chosen: {what}, and {least}", fix)
