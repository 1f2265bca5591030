"""Choosing the size: what is planned wholly, within what limits, and what is said of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample import option, plan

from podling.config import Config
from podling.plan import choose
from podling.plan.budget import spend
from podling.plan.records import Plan
from podling.plan.search import Limits
from podling.plan.target import parse_target
from podling.presets import PRESETS

TARGET = parse_target("v5e-8")


class Planner:
    """In the place of `make_plan`: every step takes `factor` times its estimate."""

    def __init__(self, source: str = "compiler", factor: float = 1.0):
        self.limits: list[Limits] = []
        self.source, self.factor = source, factor

    def __call__(
        self,
        config: Config,
        given: frozenset[str],
        target: Any,
        budget_s: float,
        data_tokens: int | None,
        say: Any,
        limits: Limits,
        most_steps: int | None = None,
    ) -> Plan:
        self.limits.append(limits)
        best = choose.best_estimate(config, target, frozenset())
        assert best is not None and best.time is not None
        step_s = best.time.step_s * self.factor
        made, compiled = option(step_s=step_s, source=self.source), limits.compiles
        use = spend(config, target, step_s, None, budget_s, data_tokens, most_steps)
        others = tuple([made] * (compiled - 1))
        return plan(config=config, chosen=made, runners_up=others, refused=(), compiled=compiled, budget=use, notes=())


def chosen(
    monkeypatch: pytest.MonkeyPatch, planner: Planner, compiles: int, seconds: float = 300, data: int | None = None
) -> Plan:
    monkeypatch.setattr(choose, "make_plan", planner)
    config = PRESETS["gpt2"].config
    config = replace(config, model=replace(config.model, vocab_size=50257))
    limits = Limits(compiles, seconds, Path("nowhere"))
    return choose.choose_size(config, frozenset(), TARGET, 9 * 3600, data, lambda words: None, limits)


@pytest.mark.parametrize("compiles", [1, 2, 3, 8])
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_the_limit_holds_for_all_sizes_together(monkeypatch: pytest.MonkeyPatch, compiles: int, factor: float) -> None:
    planner = Planner(factor=factor)
    found = chosen(monkeypatch, planner, compiles)
    assert sum(limits.compiles for limits in planner.limits) == found.compiled <= compiles
    assert len(planner.limits) >= min(2, compiles)
    first = found.sizes[0]
    assert first.compiled and found.config.model.embed == dict(choose_embeds())[first.name]
    if [size.law_loss for size in found.sizes if size.law_loss] != sorted(
        size.law_loss for size in found.sizes if size.law_loss
    ):
        assert any("would end lower; --compiles or --search-time" in note for note in found.notes)


def choose_embeds() -> list[tuple[str, int]]:
    from podling.plan.sizes import LADDER

    return [(name, embed) for name, (_, _, embed) in LADDER.items()]


def test_when_the_time_is_over_no_other_size_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner()
    chosen(monkeypatch, planner, 8, seconds=0.0)
    assert len(planner.limits) == 1 and planner.limits[0].seconds == 0


def test_only_what_a_compiler_has_seen_counts_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(size.compiled for size in chosen(monkeypatch, Planner("estimate"), 8).sizes)
    compiled = [size.compiled for size in chosen(monkeypatch, Planner(), 8).sizes]
    assert 2 <= sum(compiled) < len(compiled)


def test_forty_epochs_are_all_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, Planner(), 8, data=10**8)
    assert found.budget is not None and found.budget.epochs is not None and 39 < found.budget.epochs <= 40
    assert found.sizes[0].tokens == found.budget.tokens
    assert any("the data is read 40 times at most" in note and "of 9:00:00" in note for note in found.notes)
    assert not chosen(monkeypatch, Planner(), 8, data=10**12).notes
