"""Targets by the names that people give them."""

import pytest

from podling.errors import InputError
from podling.plan.target import parse_target


@pytest.mark.parametrize(
    ("text", "name", "devices", "slices"),
    [
        ("v3-8", "v3:2x2", 8, 1),  # cores
        ("v4-8", "v4:2x2x1", 4, 1),
        ("v5e-1", "v5e:1x1", 1, 1),
        ("v5e-4", "v5e:2x2", 4, 1),
        ("v5e-8", "v5e:2x4", 8, 1),
        ("V5E:2x4 ", "v5e:2x4", 8, 1),
        ("v5litepod-8", "v5e:2x4", 8, 1),
        ("v5e-256", "v5e:16x16", 256, 1),
        ("v5p-8", "v5p:2x2x1", 4, 1),
        ("v6e-1", "v6e:1x1", 1, 1),
        ("v6e-256", "v6e:16x16", 256, 1),
        ("2xv5e-256", "2xv5e:16x16", 512, 2),
        ("h100", "h100", 1, 1),
        ("8xh100", "8xh100", 8, 1),
        ("16xH200", "16xh200", 16, 2),  # two machines
        ("a100-80gb", "a100-80gb", 1, 1),
        ("4xt4", "4xt4", 4, 1),
        ("cpu", "cpu", 1, 1),
        ("8xcpu", "8xcpu", 8, 1),
    ],
)
def test_names(text, name, devices, slices):
    target = parse_target(text)
    assert (target.name, target.devices, target.slices) == (name, devices, slices)
    assert target.joined == devices / slices and target.text == text.strip()
    assert parse_target(name).name == name
    assert 0 < target.device_bytes


def test_what_a_device_holds():
    assert parse_target("v5e-8").device_bytes == parse_target("v5e-1").device_bytes == int(15.75 * 2**30)
    assert parse_target("8xcpu").device_bytes == pytest.approx(parse_target("cpu").device_bytes / 8, abs=1)
    assert [parse_target(text).platform for text in ("v6e-8", "t4", "cpu")] == ["tpu", "gpu", "cpu"]


def test_v4_is_marked_approximate():
    assert "not on the time" in parse_target("v4-8").approximate == parse_target("2xv4:2x2x2").approximate
    assert not parse_target("v5p-8").approximate and not parse_target("h100").approximate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5f-8", ["there is no chip 'v5f-8'", "v5e-8"]),
        ("h10", ["there is no chip 'h10'", "did you mean h100"]),
        ("rtx", ["there is no chip 'rtx'", "known: v2, v3, v4, v5e, v5p, v6e with a number", "h200, cpu"]),
        ("v100", ["there is no chip 'v100'", "did you mean"]),
        ("8x", ["is no number of chips", "v5e-8"]),
        ("", ["is no number of chips"]),
        ("0xh100", ["is no number of chips"]),
        ("v5e", ["does not say how many chips", "v5e-1, v5e-4, v5e-8"]),
        ("v5e-7", ["there is no v5e-7", "v5e-4, v5e-8"]),
        ("v5e:3x3", ["there is no v5e:3x3", "v5e:2x2, v5e:2x4"]),
        ("2xv3-8", ["slices of v3 cannot work together", "v3-2048"]),
        ("12xh100", ["at most 8 h100", "multiples of 8"]),
        ("8xt4", ["at most 4 t4", "for example 4xt4"]),
    ],
)
def test_what_is_no_target(text, words):
    with pytest.raises(InputError) as error:
        parse_target(text)
    assert [problem.where for problem in error.value.problems] == ["--chip"]
    for word in words:
        assert word in str(error.value)
