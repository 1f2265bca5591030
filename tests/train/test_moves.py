"""A run that goes on with other devices: the same batches, the same curve; on the same mesh, the same bits."""

import os
import signal
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from collector import Collector
from watching import watch

from podling.config import Config, ModelConfig
from podling.errors import Interrupted
from podling.run.checkpoint import hash_state
from podling.run.metrics import read_records
from podling.train import devices, setup
from podling.train.beginning import layout_changes
from podling.train.start import train

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def seen():
    with watch() as watched:
        yield watched


def part(config: Config, monkeypatch, chips: int, stop_at: int | None = None) -> Collector:
    """One session of a run on the first `chips` devices, to its end or stopped by SIGTERM at a step."""
    for module in (setup, devices):
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


@pytest.mark.slow
def test_8_1_4_devices_and_fsdp_to_tensor(whole, make_run, tmp_path, monkeypatch, seen):
    moved = lambda mesh, **train: make_run(tmp_path / "moved", mesh=mesh, train=train)  # noqa: E731
    part(moved("data=2,fsdp=4"), monkeypatch, chips=8, stop_at=2)
    alone = part(moved("auto", micro_batch=8), monkeypatch, chips=1, stop_at=5)
    assert "--mesh: data=2,fsdp=4 → auto since the last session" in alone.text
    assert (
        "mesh changed: data=2,fsdp=4 → data=1" in alone.text and "micro-batch changed: 16 rows → 8 rows" in alone.text
    )
    last = part(moved("tensor=4"), monkeypatch, chips=4)
    assert "resuming after step 6 of 9" in last.text and "not bit-equal" in last.text

    np.testing.assert_allclose(curve(moved("auto")), curve(whole.config), rtol=1e-4)
    assert np.ptp(curve(whole.config)) > 0.5  # something was learned, so something was compared
    for step in range(9):
        assert all((rows == whole.seen.batches[step][0]).all() for rows in seen.batches[step]), f"batch of step {step}"
    (state,) = seen.states
    for got, wanted in zip(*map(jax.tree.leaves, (state.params, whole.seen.states[0].params)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-3 * np.abs(wanted).max())
    assert len(state.params.blocks.qkv_kernel.sharding.device_set) == 4


def test_on_the_same_mesh_every_bit_is_the_same(make_run, tmp_path, monkeypatch, seen):
    mesh, model = "data=2,fsdp=2,tensor=2", {"dropout": 0.1}
    unbroken, cut = (make_run(tmp_path / name, mesh=mesh, model=model) for name in ("unbroken", "cut"))
    part(unbroken, monkeypatch, chips=8)
    part(cut, monkeypatch, chips=8, stop_at=3)
    assert "not bit-equal" not in part(cut, monkeypatch, chips=8).text
    assert (curve(cut) == curve(unbroken)).all()
    assert hash_state(seen.states[0]) == hash_state(seen.states[1])


def test_what_changed_between_two_sessions_is_said():
    here = types.SimpleNamespace(
        layout={"mesh": "data=8", "compute dtype": "float32", "micro-batch": "16 rows"},
        config=types.SimpleNamespace(model=ModelConfig(dropout=0.1)),
        batches=types.SimpleNamespace(digest=lambda step: f"digest {step}"),
    )
    same = {"step": 4, "layout": here.layout, "next_batch": "digest 4"}
    assert layout_changes(here, same) == []
    assert layout_changes(here, {"step": 4}) == []  # a checkpoint that says nothing of it
    other = {"mesh": "fsdp=4", "compute dtype": "bfloat16", "micro-batch": "8 rows"}
    assert layout_changes(here, {"step": 4, "layout": other, "next_batch": "digest 5"}) == [
        "mesh changed: fsdp=4 → data=8",
        "compute dtype changed: bfloat16 → float32",
        "micro-batch changed: 8 rows → 16 rows",
        "dropout draws other masks for micro-batches of another size",
        "the batches are not the same from here on: their order changed with these versions",
    ]
