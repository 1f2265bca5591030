"""The platform that JAX will start on."""

import os
import sys

import pytest

from podling.cli.platform import choose_platform


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("cpu", "", "cpu"),
        ("gpu", "", "cuda"),
        ("tpu", "", "tpu"),
        ("auto", "", ""),
        ("tpu", "cpu", "cpu"),  # the environment's word stands; the device gate then refuses
        ("auto", "cpu", "cpu"),
    ],
)
def test_platform(device: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", before)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    choose_platform(device)
    assert os.environ["JAX_PLATFORMS"] == after


def test_too_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setitem(sys.modules, "jax", sys)
    choose_platform("tpu")
    assert os.environ["JAX_PLATFORMS"] == ""
