"""The platform that JAX will start on."""

import os
import sys

import pytest

from podling.cli import platform
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


@pytest.mark.parametrize(
    ("libtpu", "found", "after"), [(True, None, "cpu"), (True, "tpu", ""), (True, "gpu", ""), (False, None, "")]
)
def test_the_tpu_compiler_without_a_tpu_is_left_asleep(
    libtpu: bool, found: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(platform, "find_spec", lambda name: libtpu)
    monkeypatch.setattr(platform, "accelerator", lambda: found)
    choose_platform("auto")
    assert os.environ["JAX_PLATFORMS"] == after


def test_too_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setitem(sys.modules, "jax", sys)
    choose_platform("tpu")
    assert os.environ["JAX_PLATFORMS"] == ""
