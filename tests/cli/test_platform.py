"""The platform that JAX will start on."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from podling.cli import platform
from podling.cli.main import COMMANDS
from podling.cli.platform import choose_platform
from podling.errors import InputError
from podling.parallel.hardware import accelerator


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


@pytest.mark.parametrize("count", ["abc", "0", "-1", "1.5", ""])
def test_a_number_of_devices_that_is_none_is_refused(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", count)
    with pytest.raises(InputError, match="JAX_NUM_CPU_DEVICES"):
        choose_platform("cpu")


def test_too_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setitem(sys.modules, "jax", sys)
    choose_platform("tpu")
    assert os.environ["JAX_PLATFORMS"] == ""


@pytest.fixture
def with_libtpu(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python where a libtpu is installed that cannot be loaded, and JAX tells when it tries to."""
    fake = tmp_path / "libtpu"
    fake.mkdir()
    (fake / "libtpu.so").write_text("no library")
    (fake / "__init__.py").write_text(
        "import os\ndef get_library_path():\n    return os.path.join(os.path.dirname(__file__), 'libtpu.so')\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TF_CPP"))}
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**kept, "PYTHONPATH": path, "JAX_LOGGING_LEVEL": "INFO"}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=120)

    return run


TRIED = "Unable to initialize backend 'tpu'"


@pytest.mark.parametrize(
    "command",
    ["mesh --model gpt2-nano", "plan --model gpt2-nano --chip h100", "plan --model gpt2-nano --chip cpu --mesh fsdp=3"],
)
def test_no_command_starts_the_tpu_compiler(
    command: str, with_libtpu: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    if accelerator() is not None:
        pytest.skip("this machine has an accelerator, which a command may well start")
    done = with_libtpu("-m", "podling", *command.split())
    assert done.returncode == (2 if "fsdp=3" in command else 0), done.stderr
    assert TRIED not in done.stderr


def test_jax_by_itself_would_start_it(with_libtpu: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """So that the test above can fail."""
    assert TRIED in with_libtpu("-c", "import jax; jax.devices()").stderr


def test_every_command_that_computes_chooses() -> None:
    for name, (module, _) in COMMANDS.items():
        source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
        assert ("choose_platform(" in source) == (name not in WITHOUT_JAX), name


WITHOUT_JAX = {"prepare", "launch"}
"""Commands that compute nothing themselves."""
