"""What is said of layouts that do not fit."""

from dataclasses import replace

import pytest

from podling.config import Config
from podling.cost.records import Hbm, Layout, StepTime
from podling.errors import InputError
from podling.plan.make import best_estimate, make_plan
from podling.plan.records import Option
from podling.plan.refused import does_not_fit, way_out
from podling.plan.search import Found, Limits
from podling.plan.target import Target, parse_target
from podling.presets import PRESETS

LAYOUT = Layout("data=8", 128, 4, "none", 256)
GIB = 2**30


def gpt2(name: str) -> Config:
    config = PRESETS[name].config
    return replace(config, model=replace(config.model, vocab_size=50257))


def option(layout: Layout, gib: float, estimated_s: float, *, fits: bool = True) -> Option:
    hbm = Hbm(int(gib * GIB), 16 * GIB, {"temporary": int(gib * GIB)}, (), "compiler")
    time = StepTime(1.0, (1.0, 1.0), {"matmul": 1.0}, "") if fits else None
    return Option(layout, hbm, time, estimated_s=estimated_s)


def test_the_way_out_is_the_nearest_that_fits_with_its_cost() -> None:
    refused = option(LAYOUT, 20, 1.0, fits=False)
    far = option(Layout("fsdp=8", 64, 8, "dots", 0), 4, 1.02)
    near = option(replace(LAYOUT, remat="dots"), 8, 1.05)
    assert way_out(refused, [far, near]) == "with remat dots it fits (8.00 GiB) and takes 5% longer, by estimate"
    assert way_out(refused, [far]) == (
        "with fsdp=8, 64 rows at a time, remat dots, the loss in one piece it fits (4.00 GiB) and takes 2% longer, by "
        "estimate"
    )
    assert way_out(refused, [option(replace(LAYOUT, loss_chunk=128), 8, 0.9)]).endswith(
        "at no cost in speed, by estimate"
    )
    assert way_out(refused, []) == ""


def refusal(config: Config, chip: str, *held: str) -> str:
    target: Target = parse_target(chip)
    found = Found((), (option(LAYOUT, 40, 1.0, fits=False),), 1)
    return str(does_not_fit(config, target, frozenset(held), found, best_estimate))


def test_what_can_be_done_is_named() -> None:
    held = gpt2("gpt2")
    held = replace(held, train=replace(held.train, remat="none", micro_batch=512))
    assert "without --train.micro-batch it should" in refusal(held, "v5e-8", "--train.micro-batch")
    large = refusal(gpt2("gpt2-large"), "v5e-1")
    assert "the least it needs is 40.00 GiB" in large
    assert "a smaller batch does, by estimate: --batch-tokens" in large
    assert "--model gpt2-medium" in large
    assert "--model gpt2-medium" in refusal(gpt2("gpt2-xl"), "v5e-1")


def test_a_cpu_of_several_devices_is_not_foretold(tmp_path) -> None:
    limits = Limits(1, 1.0, tmp_path)
    with pytest.raises(InputError, match="plan for --chip cpu"):
        make_plan(gpt2("gpt2"), frozenset(), parse_target("8xcpu"), None, None, print, limits)
