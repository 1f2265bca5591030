"""Which attention is chosen for a device and a model, and what is said of one that cannot be."""

from dataclasses import replace
from typing import Any

import pytest

from podling.config import Config
from podling.errors import InputError
from podling.presets import PRESETS
from podling.tuning import settled
from podling.validate import validate


def _gpt2(attention: str = "auto", dtype: str = "auto", **model: Any) -> Config:
    base = PRESETS["gpt2"].config
    train: Any = {"attention": attention, "dtype": dtype}
    return replace(base, model=replace(base.model, **model), train=replace(base.train, **train))


@pytest.mark.parametrize(
    ("platform", "kind", "config", "expected"),
    [
        ("tpu", "TPU v5 lite", _gpt2(), "fused"),
        ("tpu", "TPU v5 lite", _gpt2(context=2048), "fused"),
        ("tpu", "TPU v5 lite", _gpt2(context=4096), "splash"),
        ("tpu", "TPU v5 lite", _gpt2(context=1000), "reference"),
        ("tpu", "TPU v5 lite", _gpt2(dropout=0.1), "reference"),
        ("tpu", "TPU v5 lite", _gpt2(heads=16), "reference"),  # a head_dim of 48
        ("tpu", "TPU v5 lite", _gpt2(dtype="float32"), "reference"),
        ("tpu", "TPU v5 lite", _gpt2("reference"), "reference"),
        ("tpu", "TPU v3", _gpt2(), "reference"),
        ("gpu", "NVIDIA H200", _gpt2(), "cudnn"),
        ("gpu", "NVIDIA H200", _gpt2(dtype="float32"), "reference"),
        ("cpu", "cpu", _gpt2(), "reference"),
    ],
)
def test_what_auto_is(platform: str, kind: str, config: Config, expected: str) -> None:
    assert settled(config, platform, kind).train.attention == expected


@pytest.mark.parametrize(("which", "platform", "kind"), [("fused", "cpu", "cpu"), ("splash", "tpu", "TPU v3")])
def test_a_kernel_of_another_device_is_refused(which: str, platform: str, kind: str) -> None:
    with pytest.raises(InputError, match=f"{which} is a kernel for TPUs"):
        settled(_gpt2(which), platform, kind)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (_gpt2("fused", context=1000), "cannot take 1000 tokens: it takes a multiple of 128"),
        (_gpt2("fused", context=4096), "cannot take 4096 tokens: it takes at most 2048"),
        (_gpt2("fused", dtype="float32"), "cannot take 1024 tokens: it takes at most 512"),
        (_gpt2("fused", heads=16), "a head_dim of 48: it takes a divisor or a multiple of 128"),
        (_gpt2("splash", dropout=0.1), "cannot drop attention weights: it takes no dropout"),
        (_gpt2("cudnn", dtype="float32"), "in bfloat16: it takes bfloat16"),
    ],
)
def test_the_gate_says_what_a_kernel_takes(config: Config, says: str) -> None:
    [problem] = [found for found in validate(config, ("model", "train")) if found.where == "--train.attention"]
    assert says in f"{problem.what}: {problem.fix}"
