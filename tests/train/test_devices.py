"""The device gate of several processes."""

from types import SimpleNamespace

import jax
import pytest

from podling.train import devices


class Processes:
    """Stands for processes of a run, of which this is one; the others' speeds are given."""

    def __init__(self, process: int, told: list[float]):
        self.hosts = SimpleNamespace(process=process, count=len(told))
        self._told = told

    def exchange(self, name: str, value: float, limit_s: float) -> list[float]:
        return [*self._told[: self.hosts.process], value, *self._told[self.hosts.process + 1 :]]


@pytest.mark.parametrize(
    ("process", "told", "share"),
    [(0, [0.0, 0.0, 90e9], 40e9), (1, [80e9, 0.0, 90e9], 40e9), (2, [80e9, 0.0, 0.0], 80e9)],
)
def test_processes_of_one_machine_share_its_cpu(monkeypatch, process, told, share):
    """Each took the whole CPU for its own, and MFU was halved; one measures, so that they do not slow one another."""
    measured = []
    monkeypatch.setattr(devices, "measure_cpu_flops", lambda device: measured.append(device) or 80e9)
    names = ["one", "one", "other"]
    assert devices._cpu_flops(names, Processes(process, told)) == share  # type: ignore[arg-type]
    assert measured == ([] if process == 1 else [jax.local_devices()[0]])


def test_a_process_alone_measures_with_its_session(monkeypatch):
    monkeypatch.setattr(devices, "measure_cpu_flops", lambda device: pytest.fail("measured"))
    assert devices._cpu_flops(["one"], Processes(0, [0.0])) is None  # type: ignore[arg-type]
