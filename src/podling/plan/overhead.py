"""What of a session goes to checkpoints and evaluations, where that is much, and what makes it less."""

from collections.abc import Iterator
from dataclasses import replace

from podling.config import Config
from podling.plan.budget import spend
from podling.plan.records import BudgetUse
from podling.plan.target import Target

MUCH = 0.05
"""Of the budget."""


def overhead_notes(
    config: Config, target: Target, step_s: float, compile_s: float | None, use: BudgetUse, data_tokens: int | None
) -> list[str]:
    """For each of the two that takes more than a twentieth of the session, how to make it take less.

    Args:
        config: as `spend` was given it.
        target: likewise.
        step_s: likewise.
        compile_s: likewise.
        use: what it answered.
        data_tokens: as it was given.
    """

    def spent(other: Config) -> BudgetUse:
        return spend(other, target, step_s, compile_s, use.budget_s, data_tokens)

    rarer_saves = (
        (every, spent(replace(config, run=replace(config.run, checkpoint_every=every))).checkpoint_s)
        for every in _rarer(config.run.checkpoint_every, use.steps)
    )
    rarer_evals = (
        (every, spent(replace(config, train=replace(config.train, eval_every=every))).evaluation_s)
        for every in _rarer(config.train.eval_every, use.steps)
    )
    return [
        *_note("checkpoints", "--checkpoint-every", use.checkpoint_s, rarer_saves, use.budget_s),
        *_note("evaluations", "--eval-every", use.evaluation_s, rarer_evals, use.budget_s),
    ]


def _note(what: str, flag: str, now_s: float, rarer: Iterator[tuple[int, float]], budget_s: float) -> list[str]:
    if now_s <= MUCH * budget_s:
        return []
    words = f"{what} take {now_s / budget_s:.0%} of the session"
    for every, then_s in rarer:
        if then_s <= MUCH * budget_s:
            return [f"{words}: with {flag} {every} it is {then_s / budget_s:.1%}"]
    return [f"{words}, and no {flag} within it makes that {MUCH:.0%}"]


def _rarer(every: int, steps: int) -> Iterator[int]:
    """Round numbers above `every`, within the run: 200, 500, 1000 ..."""
    power = 1
    while 0 < every and power < steps:
        yield from (size for size in (power, 2 * power, 5 * power) if every < size < steps)
        power *= 10
