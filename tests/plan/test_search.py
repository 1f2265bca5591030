"""The search, with a compiler whose answers are known."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from podling.config import TrainConfig
from podling.cost.records import Hbm, Layout, StepTime
from podling.plan.records import Option
from podling.plan.search import Found, Limits, best_first, layouts, search
from podling.plan.target import parse_target
from podling.presets import PRESETS

LIMIT = 16_000
GPT2 = replace(PRESETS["gpt2"].config, model=replace(PRESETS["gpt2"].config.model, vocab_size=50257))
V5E8 = parse_target("v5e-8")
LIMITS = Limits(compiles=10, seconds=300, cache=Path("unused"))


def option(layout: Layout, need: float, step_s: float | None) -> Option:
    hbm = Hbm(int(need), LIMIT, {"temporary": int(need)}, (), "estimate")
    time = None if step_s is None else StepTime(step_s, (step_s, step_s), {"matmul": step_s}, "")
    return Option(layout, hbm, time)


REMAT_S = {"none": 1.0, "dots": 1.1, "full": 1.3}
REMAT_BYTES = {"none": 1500, "dots": 400, "full": 100}


def estimate(layout: Layout) -> Option:
    rows = layout.micro_batch // 8
    step_s = REMAT_S[layout.remat] + 0.2 / rows + 0.05 * (layout.loss_chunk > 0) + 0.2 * (layout.mesh != "data=8")
    need = 2000 + rows * (REMAT_BYTES[layout.remat] + 4 * (layout.loss_chunk or 1024))
    return option(layout, need, step_s)


SPACE = [
    Layout(mesh, 8 * rows, 64 // rows, remat, chunk)
    for mesh, rows, remat, chunk in itertools.product(
        ("data=8", "fsdp=8", "data=4,fsdp=2"), (1, 2, 4, 8, 16, 32, 64), REMAT_S, (0, 128, 256, 512)
    )
]


class Compiler:
    """The truth: the estimate, wrong in its own way."""

    def __init__(self, wrong_s, wrong_bytes=lambda layout: 1.0):
        self.wrong_s, self.wrong_bytes = wrong_s, wrong_bytes
        self.asked: list[Layout] = []

    def truth(self, layout: Layout) -> Option:
        guess = estimate(layout)
        need = guess.hbm.total_bytes * self.wrong_bytes(layout)
        assert guess.time is not None
        return option(layout, need, guess.time.step_s * self.wrong_s(layout) if need <= LIMIT else None)

    def __call__(self, layout: Layout) -> Option:
        assert layout not in self.asked
        self.asked.append(layout)
        return self.truth(layout)

    def best(self) -> float:
        return min(truth.time.step_s for truth in map(self.truth, SPACE) if truth.time is not None)


def run(compiler: Compiler, limits: Limits = LIMITS) -> Found:
    return search([estimate(layout) for layout in SPACE], compiler, limits)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda layout: 1.5,  # as a whole
        lambda layout: {"none": 1.3, "dots": 1.0, "full": 1.0}[layout.remat],  # a policy
        lambda layout: {"none": 1.3, "dots": 1.3, "full": 0.95}[layout.remat],
        lambda layout: 1.0 if layout.loss_chunk else 1.2,  # a chunk
        lambda layout: {"data=8": 1.25}.get(layout.mesh, 1.0),  # a mesh
        lambda layout: {"none": 1.2, "dots": 1.1, "full": 0.9}[layout.remat] * (1 + 0.1 * (layout.micro_batch > 64)),
    ],
)
def test_estimates_that_are_wrong_in_one_way_still_lead_to_the_best(wrong) -> None:
    compiler = Compiler(wrong)
    found = run(compiler)
    assert found.fitting[0].time is not None
    assert found.fitting[0].time.step_s <= 1.03 * compiler.best()
    assert len(compiler.asked) <= LIMITS.compiles
    assert found.considered == len(SPACE)
    times = [answer.time.step_s for answer in found.fitting if answer.time]
    assert times[0] <= 1.01 * min(times) and times[1:] == sorted(times[1:]) and len(times) == len(found.fitting)


def test_memory_that_is_underestimated_is_learned() -> None:
    compiler = Compiler(lambda layout: 1.0, lambda layout: 1.8)
    found = run(compiler)
    assert found.refused, "the first estimates should have been refused"
    assert len(found.refused) <= 3, "and the lesson learned"
    assert found.fitting[0].time is not None
    assert found.fitting[0].time.step_s <= 1.03 * compiler.best()


def test_it_ends_when_nothing_left_looks_faster() -> None:
    compiler = Compiler(lambda layout: 1.0)
    run(compiler)
    assert len(compiler.asked) < LIMITS.compiles


def test_time_and_number_of_compilations_are_limits() -> None:
    rough = lambda layout: 1 + 0.3 * ((hash(str(layout)) % 7) / 7)  # noqa: E731
    compiler = Compiler(rough)
    run(compiler, replace(LIMITS, compiles=2))
    assert len(compiler.asked) == 2
    ticks = itertools.count(0, 20)  # two looks at the clock for a compilation
    compiler = Compiler(rough)
    search([estimate(layout) for layout in SPACE], compiler, replace(LIMITS, seconds=100), clock=lambda: next(ticks))
    assert len(compiler.asked) in (2, 3)


def test_nothing_that_fits_is_said_with_what_was_refused() -> None:
    compiler = Compiler(lambda layout: 1.0, lambda layout: 100.0)
    found = run(compiler)
    assert not found.fitting and found.refused
    least = min(estimate(layout).hbm.total_bytes for layout in SPACE)
    assert min(answer.hbm.total_bytes for answer in found.refused) == 100 * least, "the smallest was tried"


def test_the_space_holds_what_was_said_and_divides_the_batch() -> None:
    found = layouts(GPT2, V5E8, frozenset())
    assert {layout.remat for layout in found} == {"none", "dots", "full"}
    assert {layout.loss_chunk for layout in found} == {0, 128, 256, 512}
    assert "tensor=8" not in {layout.mesh for layout in found}, "12 heads do not divide over it"
    assert all(layout.micro_batch * layout.accumulation == 512 for layout in found)
    config = replace(GPT2, train=replace(GPT2.train, remat="full", loss_chunk=512, micro_batch=64))
    held = frozenset({"--train.remat", "--train.loss-chunk", "--train.micro-batch"})
    assert {(x.remat, x.loss_chunk, x.micro_batch) for x in layouts(config, V5E8, held)} == {("full", 512, 64)}


def test_chunks_are_parts_of_the_context() -> None:
    config = replace(GPT2, model=replace(GPT2.model, context=384), train=TrainConfig(batch_tokens=384 * 8))
    assert {layout.loss_chunk for layout in layouts(config, V5E8, frozenset())} == {0, 128}


def test_of_those_as_fast_the_one_that_needs_least_memory_is_best() -> None:
    full = option(SPACE[0], 15_900, 1.0)
    lean, leaner = option(SPACE[1], 9_000, 1.009), option(SPACE[2], 5_000, 1.02)
    assert best_first([leaner, lean, full]) == (lean, full, leaner)
    assert best_first([]) == ()
