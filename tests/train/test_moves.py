"""A run that is stopped and goes on with other devices: the same batches, the same curve; on the same mesh, the same bits."""

import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from collector import Collector

from podling.config import Config
from podling.data.batches import Batches
from podling.errors import Interrupted
from podling.parallel import device
from podling.run.checkpoint import hash_state
from podling.run.metrics import read_records
from podling.train import devices, session
from podling.train.loop import Run
from podling.train.start import train

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(autouse=True)
def _peak(monkeypatch):
    monkeypatch.setattr(device, "_measure_gemm", lambda chip: 1e11)


@pytest.fixture
def watched(monkeypatch):
    """The state each session ends with, and the batches it read, by step."""
    states, batches = [], {}
    to_the_end, read = Run.steps, Batches.batch

    def steps(self, state, start, stop):
        states.append(to_the_end(self, state, start, stop))
        return states[-1]

    def batch(self, step):
        found = read(self, step)
        batches.setdefault(step, []).append(found.inputs.reshape(-1, self.context))
        return found

    monkeypatch.setattr(Run, "steps", steps)
    monkeypatch.setattr(Batches, "batch", batch)
    return states, batches


def part(config: Config, monkeypatch, chips: int, stop_at: int | None = None) -> Collector:
    """One session of a run on the first `chips` devices, to its end or stopped by SIGTERM at a step."""
    for module in (session, devices):
        monkeypatch.setattr(module, "select_devices", lambda asked: jax.devices()[:chips])

    def stop(step: int) -> None:
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    reporter = Collector(stop)
    if stop_at is None:
        train(config, reporter)
    else:
        with pytest.raises(Interrupted):
            train(config, reporter)
    return reporter


def curve(config: Config) -> np.ndarray:
    records, broken = read_records(Path(config.run.out) / "metrics.jsonl")
    assert not broken
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert [step for step, _ in losses] == list(range(1, 10))
    return np.array([loss for _, loss in losses])


def test_8_1_4_devices_and_fsdp_to_tensor(make_run, tmp_path, monkeypatch, watched):
    states, batches = watched
    whole = make_run(tmp_path / "whole")
    part(whole, monkeypatch, chips=8)
    moved = lambda mesh, **train: make_run(tmp_path / "moved", mesh=mesh, train=train)  # noqa: E731
    part(moved("data=2,fsdp=4"), monkeypatch, chips=8, stop_at=2)
    alone = part(moved("auto", micro_batch=8), monkeypatch, chips=1, stop_at=5)
    assert "--mesh: data=2,fsdp=4 → auto since the last session" in alone.text
    assert "mesh changed: data=2,fsdp=4 → data=1" in alone.text and "micro-batch changed: 16 rows → 8 rows" in alone.text
    last = part(moved("tensor=4"), monkeypatch, chips=4)
    assert "resuming after step 6 of 9" in last.text and "not bit-equal" in last.text

    np.testing.assert_allclose(curve(moved("auto")), curve(whole), rtol=1e-4)
    assert np.ptp(curve(whole)) > 0.5  # something was learned, so something was compared
    for step in range(9):
        first, *others = batches[step]
        assert others and all((other == first).all() for other in others), f"batch of step {step}"
    for got, wanted in zip(*map(jax.tree.leaves, (states[-1].params, states[0].params)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-3 * np.abs(wanted).max())
    assert len(states[-1].params.blocks.qkv_kernel.sharding.device_set) == 4


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2"])
def test_on_the_same_mesh_every_bit_is_the_same(make_run, tmp_path, monkeypatch, watched, mesh):
    states, _ = watched
    whole, cut = (make_run(tmp_path / name, mesh=mesh, model={"dropout": 0.1}) for name in ("whole", "cut"))
    part(whole, monkeypatch, chips=8)
    part(cut, monkeypatch, chips=8, stop_at=3)
    assert "not bit-equal" not in part(cut, monkeypatch, chips=8).text
    assert (curve(cut) == curve(whole)).all()
    assert hash_state(states[-1]) == hash_state(states[0])


def test_another_order_of_the_batches_is_said(make_run, tmp_path, monkeypatch):
    config = make_run(tmp_path / "run")
    part(config, monkeypatch, chips=1, stop_at=2)
    starts = Batches.starts
    monkeypatch.setattr(Batches, "starts", lambda self, step: starts(self, step)[::-1])
    said = part(config, monkeypatch, chips=1).text
    assert "the batches are not the same from here on" in said
