"""The size of the model, when the plan is to choose it: the one that should end with the lowest loss."""

import math
from collections.abc import Callable
from dataclasses import replace

from podling.config import Config
from podling.errors import InputError, Problem, raise_if
from podling.plan.make import HELD, best_estimate, make_plan
from podling.plan.records import Plan, Size
from podling.plan.search import Limits
from podling.plan.sizes import Candidate, Ranked, candidates, rank_sizes
from podling.plan.target import Target

AGAINST = 2
"""Sizes that are compiled at least: the one that is chosen and the one that comes after it."""


def choose_size(
    config: Config,
    given: frozenset[str],
    target: Target,
    budget_s: float | None,
    data_tokens: int | None,
    say: Callable[[str], None],
    limits: Limits,
) -> Plan:
    """The plan of the size that ends lowest, with the others beside it.

    All sizes are ranked by estimates; those that look best are planned wholly, and what the compiler says of them
    corrects the estimates of the others, until the best of all and the next have been planned.

    Args:
        config: validated, with `vocab_size` known; its size is replaced.
        given: the flags that the person typed.
        target: what to plan for.
        budget_s: seconds of the session.
        data_tokens: training tokens there are; None when it is not known.
        say: told what is being done.
        limits: of all searches together.

    Raises:
        InputError: nothing fits, or the budget is too short to begin, or no law tells the sizes apart.
        RunError: the compiler died.
    """
    assert budget_s is not None, "the command asks for one"
    sizes = candidates(config, given)
    held = frozenset(given) & frozenset(HELD)
    estimates = {one.name: best_estimate(one.config, target, held) for one in sizes}
    estimates_s = {name: option.time.step_s for name, option in estimates.items() if option and option.time}
    if not estimates_s:
        smallest = min(sizes, key=lambda one: one.params)
        make_plan(smallest.config, given, target, budget_s, data_tokens, say, limits)  # says why not
    plans: dict[str, Plan] = {}
    refused: list[Problem] = []
    each = replace(limits, compiles=max(2, limits.compiles // AGAINST), seconds=limits.seconds / AGAINST)
    while True:
        if not estimates_s:
            raise_if(refused)
        ranked = rank_sizes(sizes, _corrected(estimates_s, plans), target, budget_s, _compile_s(plans), data_tokens)
        new = next((one.candidate for one in ranked[:AGAINST] if one.candidate.name not in plans), None)
        if new is None or (len(plans) > AGAINST and ranked[0].candidate.name in plans):
            return _with_sizes(plans[ranked[0].candidate.name], ranked, plans, sizes)
        say(f"planning {new.name}, {new.params / 1e6:.0f}M parameters")
        try:
            plans[new.name] = make_plan(new.config, given, target, budget_s, data_tokens, say, each)
        except InputError as error:  # the estimate let pass what the compiler does not
            refused += error.problems
            del estimates_s[new.name]


def _corrected(estimates_s: dict[str, float], plans: dict[str, Plan]) -> dict[str, float]:
    """Seconds of a step: as planned, or as estimated times what the planned ones took against their estimates."""
    known = {name: plan.chosen.time.step_s for name, plan in plans.items() if plan.chosen.time}
    ratios = [math.log(step_s / estimates_s[name]) for name, step_s in known.items()]
    factor = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
    return {name: known.get(name, factor * step_s) for name, step_s in estimates_s.items()}


def _compile_s(plans: dict[str, Plan]) -> dict[str, float | None]:
    return {name: plan.chosen.compile_s for name, plan in plans.items()}


def _with_sizes(chosen: Plan, ranked: list[Ranked], plans: dict[str, Plan], sizes: tuple[Candidate, ...]) -> Plan:
    rows = [
        Size(
            name=one.candidate.name,
            params=one.candidate.params,
            tokens=one.use.tokens,
            tokens_per_s=one.candidate.config.train.batch_tokens / one.step_s,
            loss_range=one.loss_range,
            compiled=one.candidate.name in plans,
            fits=True,
        )
        for one in ranked
    ]
    named = {row.name for row in rows}
    rows += [Size(one.name, one.params, 0, 0.0, None, False, False) for one in sizes if one.name not in named]
    compiled = sum(plan.compiled for plan in plans.values())
    return replace(chosen, sizes=tuple(rows), compiled=compiled, plan_s=sum(plan.plan_s for plan in plans.values()))
