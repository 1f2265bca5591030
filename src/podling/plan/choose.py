"""The size of the model, when the plan is to choose it: the one that should end with the lowest loss."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from podling.config import Config
from podling.cost.scaling_law import MOST_EPOCHS
from podling.errors import InputError, Problem, raise_if
from podling.plan.budget import total_s
from podling.plan.make import HELD, best_estimate, make_plan
from podling.plan.records import Plan, Size
from podling.plan.search import Limits
from podling.plan.sizes import Candidate, Ranked, candidates, most_steps, rank_sizes
from podling.plan.target import Target
from podling.train.progress.words import duration

AGAINST = 2
"""Sizes that are compiled, where the limits allow: the one that is chosen and the one that comes after it."""


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
    left = _Left(limits, time.monotonic())
    while True:
        if not estimates_s:
            raise_if(refused)
        times_s = _corrected(estimates_s, plans)
        ranked = rank_sizes(sizes, times_s, target, budget_s, _compile_s(plans), data_tokens, given)
        new = next((one.candidate for one in ranked[:AGAINST] if one.candidate.name not in plans), None)
        settled = len(plans) > AGAINST and ranked[0].candidate.name in plans
        if new is None or settled or (plans and left.nothing()):
            return _with_sizes(ranked, plans, sizes, data_tokens)
        say(f"planning {new.name}, {new.params / 1e6:.0f}M parameters")
        each, most = left.share(first=not plans), most_steps(new.config, data_tokens)
        try:
            plans[new.name] = make_plan(new.config, given, target, budget_s, data_tokens, say, each, most)
            left.take(plans[new.name])
        except InputError as error:  # the estimate let pass what the compiler does not
            left.compiles -= each.compiles
            refused += error.problems
            del estimates_s[new.name]


class _Left:
    """What is left of the limits of all searches together."""

    def __init__(self, limits: Limits, began_s: float):
        self.limits, self.compiles, self.began_s = limits, limits.compiles, began_s

    def nothing(self) -> bool:
        """Whether no other size may be planned; by estimate that costs nothing."""
        return self.compiles < 1 or self._seconds() <= 0

    def share(self, *, first: bool) -> Limits:
        """For the next size: half for the first, and then all but one program, in case the order changes."""
        compiles = self.compiles // 2 if first else self.compiles - 1
        seconds = self._seconds() / AGAINST if first else self._seconds()
        return replace(self.limits, compiles=max(1, compiles), seconds=max(0.0, seconds))

    def take(self, plan: Plan) -> None:
        """Programs that a plan was made from, from the cache or not."""
        if plan.chosen.hbm.source == "compiler":
            self.compiles -= max(plan.compiled, 1 + len(plan.runners_up) + len(plan.refused))

    def _seconds(self) -> float:
        return self.limits.seconds - (time.monotonic() - self.began_s)


def _corrected(estimates_s: dict[str, float], plans: dict[str, Plan]) -> dict[str, float]:
    """Seconds of a step: as planned, or as estimated times what the planned ones took against their estimates."""
    known = {name: plan.chosen.time.step_s for name, plan in plans.items() if plan.chosen.time}
    ratios = [math.log(step_s / estimates_s[name]) for name, step_s in known.items()]
    factor = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
    return {name: known.get(name, factor * step_s) for name, step_s in estimates_s.items()}


def _compile_s(plans: dict[str, Plan]) -> dict[str, float | None]:
    return {name: plan.chosen.compile_s for name, plan in plans.items()}


def _with_sizes(
    ranked: list[Ranked], plans: dict[str, Plan], sizes: tuple[Candidate, ...], data_tokens: int | None
) -> Plan:
    """The plan of the best size that has one, with all of them beside it, that one first."""
    best = next(one for one in ranked if one.candidate.name in plans)
    chosen, notes = plans[best.candidate.name], []
    rows = [
        Size(
            name=one.candidate.name,
            params=one.candidate.params,
            tokens=one.use.tokens,
            tokens_per_s=one.candidate.config.train.batch_tokens / one.step_s,
            loss_range=one.loss_range,
            compiled=one.candidate.name in plans and plans[one.candidate.name].chosen.hbm.source == "compiler",
            fits=True,
            law_loss=one.law_loss,
        )
        for one in sorted(ranked, key=lambda one: one is not best)
    ]
    named = {row.name for row in rows}
    rows += [Size(one.name, one.params, 0, 0.0, None, False, False) for one in sizes if one.name not in named]
    if best is not ranked[0]:
        notes.append(
            f"by estimate {ranked[0].candidate.name} would end lower; --compiles or --search-time was spent before it "
            "was compiled"
        )
    use = chosen.budget
    if use and use.steps == most_steps(chosen.config, data_tokens):
        notes.append(
            f"the data is read {MOST_EPOCHS} times at most, as more has been seen to bring nothing (Muennighoff et al. "
            f"2023): the run ends after {duration(total_s(use))} of {duration(use.budget_s)}; more text would help it"
        )
    compiled, plan_s = sum(plan.compiled for plan in plans.values()), sum(plan.plan_s for plan in plans.values())
    return replace(chosen, sizes=tuple(rows), compiled=compiled, plan_s=plan_s, notes=(*chosen.notes, *notes))
