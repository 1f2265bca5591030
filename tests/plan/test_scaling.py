"""From one chip to 256: which sizes are planned, with which batch, what is derived, and how it is drawn."""

import io
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rich.console import Console
from sample import option, plan

from podling.errors import InputError, Problem
from podling.plan.scaling import Point, Scaling, scale, show_scaling, sizes_of, weak_batch
from podling.plan.scaling_svg import picture
from podling.plan.target import parse_target
from podling.presets import PRESETS

SVG = "{http://www.w3.org/2000/svg}"
CONFIG = PRESETS["gpt2"].config


def point(devices: int, tokens_per_s: float | None, batch: int = 524288, **changes) -> Point:
    step_s = batch / tokens_per_s if tokens_per_s else None
    made = Point(
        f"v5e-{devices}", devices, batch, f"data={devices}", "all", step_s, None, tokens_per_s, 0.4, 0.1, 2**30
    )
    return replace(made, source="compiler", **changes)


def curves() -> Scaling:
    strong = (point(1, None, why="too large"), point(4, 4e5), point(16, 1.2e6), point(256, 6.4e6))
    weak = (point(1, 1e5, 65536), point(4, 4e5, 262144), point(16, 1.56e6, 1048576), point(256, 2.3e7, 16777216))
    return Scaling("gpt2", "v5e", strong, weak)


@pytest.mark.parametrize(
    ("chip", "devices"),
    [
        ("v5e-8", [1, 4, 8, 16, 32, 64, 128, 256]),
        ("v6e-1", [1, 4, 8, 16, 32, 64, 128, 256]),
        ("v3-8", [8, 32, 64, 128, 256, 512]),  # cores
        ("v5p-8", [4, 8, 16, 32, 64, 128, 256]),
        ("8xh100", [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ("2xv5e-256", [1, 4, 8, 16, 32, 64, 128, 256, 512]),
        ("2xv5e-4", [1, 4, 8, 16, 32, 64, 128, 256]),
        ("3xh100", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256]),
    ],
)
def test_every_size_that_exists(chip, devices):
    found = sizes_of(parse_target(chip))
    assert [target.devices for target in found] == devices
    assert len({target.chip.name for target in found}) == 1
    assert parse_target(chip) in found


def test_a_cpu_does_not_scale():
    with pytest.raises(InputError, match="share its cores and its memory"):
        sizes_of(parse_target("cpu"))


def test_the_weak_batch_keeps_the_rows_of_a_device():
    assert weak_batch(CONFIG, parse_target("v5e-8"), 8) == 524288
    assert weak_batch(CONFIG, parse_target("v5e-8"), 256) == 32 * 524288
    assert weak_batch(CONFIG, parse_target("v5e-256"), 1) == 2 * 1024
    small = replace(CONFIG, train=replace(CONFIG.train, batch_tokens=4096))
    assert weak_batch(small, parse_target("v5e-256"), 4) == 4 * 1024  # a row at least


def test_each_size_is_planned_once_for_each_batch():
    asked, said = [], []

    def plan_of(config, target):
        asked.append((target.text, config.train.batch_tokens))
        if target.devices == 1:
            raise InputError(Problem("--chip", "gpt2 does not fit", "more devices"))
        return plan(
            target=target, config=config, chosen=option(f"data={target.devices}"), tokens_per_s=1e5 * target.devices
        )

    found = scale("gpt2", CONFIG, parse_target("v5e-8"), plan_of, said.append)
    assert len(asked) == len(set(asked)) == 15 == len(said)  # at the target's own size both curves are one plan
    assert ("v5e-16", 524288) in asked and ("v5e-16", 1048576) in asked
    assert [p.batch_tokens for p in found.strong] == [524288] * 8
    assert [p.batch_tokens // p.devices for p in found.weak] == [65536] * 8
    first, second = found.strong[:2]
    assert first.step_s is None and first.why == "gpt2 does not fit"
    assert (second.mesh, second.step_s, second.waiting) == ("data=4", 0.5, pytest.approx(0.1))
    assert found.efficiency("strong") == [None, *[pytest.approx(1.0)] * 7]


def test_efficiency_is_against_the_smallest_that_fits():
    assert curves().efficiency("strong") == [None, 1.0, pytest.approx(0.75), pytest.approx(0.25)]
    assert curves().efficiency("weak") == [1.0, 1.0, pytest.approx(0.975), pytest.approx(0.8984, abs=1e-4)]
    record = curves().record()
    assert record["strong"][2]["efficiency"] == pytest.approx(0.75)
    assert record["strong"][0]["step_s"] is None and record["strong"][0]["why"] == "too large"


def test_the_tables():
    stream = io.StringIO()
    made = curves()
    show_scaling(
        replace(made, weak=(*made.weak[:3], replace(made.weak[3], source="estimate"))), Console(file=stream, width=80)
    )
    text = stream.getvalue()
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "does", "not", "fit", "524K"] in rows
    assert ["16", "data=16", "524K", "0.437", "s", "1.20M", "75.0%", "40.0%", "10.0%"] in rows
    assert ["256", "data=256", "16.8M", "0.729", "s", "est.", "23.0M", "89.8%", "40.0%", "10.0%"] in rows
    assert "est.: no compiler" in text and "…" not in text and max(map(len, text.splitlines())) <= 80


def test_the_picture_holds_every_point_in_its_place():
    root = ET.fromstring(picture(curves()))
    dots = [(float(c.get("cx", 0)), float(c.get("cy", 0)), c.get("fill")) for c in root.iter(f"{SVG}circle")]
    assert len(dots) == 2 * (3 + 4)  # two panels; what does not fit has no dot
    strong = [dot for dot in dots if dot[2] == dots[0][2]]
    speeds, shares = strong[:3], strong[3:]
    # 4, 16, 256 devices: as far apart as their doublings, 2 and 4.
    assert (speeds[2][0] - speeds[1][0]) == pytest.approx(2 * (speeds[1][0] - speeds[0][0]), abs=0.3)
    # Upwards: 3 times and 16/3 times as fast, on a logarithmic axis.
    up, further = speeds[0][1] - speeds[1][1], speeds[1][1] - speeds[2][1]
    assert further / up == pytest.approx(1.674 / 1.0986, rel=0.01)
    assert shares[1][1] - shares[0][1] == pytest.approx(0.5 * (shares[2][1] - shares[1][1]), abs=0.2)  # 100, 75, 25
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for x, y, _ in dots:
        assert 60 < x < width and 0 < y < height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y", 0)) <= height and float(text.get("font-size", 0)) >= 12
        if text.get("text-anchor") is None:
            assert float(text.get("x", 0)) + 0.62 * float(text.get("font-size", 0)) * len(text.text or "") <= width
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("256") == 2 and "1.00M" in words and "from compiled programs" in words


def test_what_efficiency_is_against_is_said():
    assert curves().measure() == [
        "efficiency: tokens/s of a device against the first that fits:",
        "strong: 4 devices; weak: 1 device",
    ]
    better = replace(curves(), weak=(point(1, 1e5), point(4, 5.27e5)))
    assert better.efficiency("weak")[1] == pytest.approx(1.3175)
    assert "over 100%: a device is faster there" in better.measure()[2]
    stream = io.StringIO()
    show_scaling(better, Console(file=stream, width=80))
    drawn = picture(better)
    assert all(words in stream.getvalue() and words in drawn for words in better.measure())
    assert ">125<" in drawn


def test_the_title_names_the_sizes_that_are_drawn():
    assert "gpt2 on v5e, 1 to 256 devices" in picture(curves()) and "strong, does not fit: 1<" in picture(curves())
    few = Scaling("gpt2", "v5e", (point(1, None), point(4, 4e5), point(8, 8e5)), (point(1, None), point(4, 4e5)))
    assert "gpt2 on v5e, 4 to 8 devices" in picture(few)
    assert "strong, does not fit: 1<" in picture(few) and "weak, does not fit: 1<" in picture(few)


def test_the_picture_of_nothing_and_of_estimates():
    nothing = Scaling("gpt2", "v5e", (point(1, None, why="x"),), (point(1, None, why="x"),))
    assert picture(nothing).count("nothing fits") == 2
    guessed = replace(curves(), strong=tuple(replace(p, source="estimate") for p in curves().strong))
    assert "partly estimated" in picture(guessed)
