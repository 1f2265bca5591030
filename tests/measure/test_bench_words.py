"""What a bench concludes, from figures that are known."""

import dataclasses
from typing import Any

import jax
import pytest

from podling.config import Config, ModelConfig, RunConfig, TrainConfig
from podling.cost.hbm import MemoryStats
from podling.cost.records import StepTime
from podling.measure.bench import Bench, StepSpeed
from podling.measure.generation import GenerationSpeed
from podling.measure.peaks import Peaks, measure_peaks, reading_s
from podling.measure.steps import resolved
from podling.measure.text import lines
from podling.parallel import device
from podling.parallel.device import Peak
from podling.train.setup import Setup

CONFIG = Config(
    model=ModelConfig(preset="gpt2-nano", layers=1, heads=1, embed=64, mlp=256, context=16),
    train=TrainConfig(batch_tokens=256),
    run=RunConfig(mesh="data=4,tensor=2"),
)


@pytest.fixture
def measured() -> Bench:
    memory = MemoryStats(2**20, 2**20, 2**20, 2**21, 0)
    step = StepSpeed(11, 0.25, 0.2, 0.5, 0.001, 1.5, memory, 3.0)
    parts: Any = {"matmul": 0.1, "memory": 0.15, "compute": 0.0, "collective": 0.0}
    return Bench(
        setup=Setup.of(resolved(dataclasses.replace(CONFIG, run=RunConfig(mesh="data=8")), 100)),
        peaks=Peaks(2e6, "measured: a product here", 30e9, None),
        step=step,
        predicted=StepTime(0.25, (0.2, 0.3), parts, "words"),
        unknown="",
        loader_tokens_per_s=2e6,
        generation=(GenerationSpeed(1, 8, 9, 0.005, 500.0, 1000.0), GenerationSpeed(8, 8, 9, 0.02, None, 1000.0)),
        others=0.0,
    )


def test_mfu_by_hand(measured):
    flops_of_a_token = 6 * (4 * 64 * 64 + 2 * 64 * 256 + 100 * 64) + 12 * 64 * 16
    assert measured.tokens_per_s == 1024
    assert measured.mfu == pytest.approx(1024 * flops_of_a_token / 8 / 2e6)
    assert measured.record()["mfu"] == measured.mfu


def test_what_bounds_training(measured):
    def bound(**changed: Any) -> str:
        return dataclasses.replace(measured, **changed).bound

    assert measured.bound == "memory"
    assert bound(step=dataclasses.replace(measured.step, wait_share=0.3)) == "data"
    parts: Any = {"matmul": 0.2, "memory": 0.05}
    assert bound(predicted=StepTime(0.25, (0.2, 0.3), parts, "")) == "matmul"
    assert bound(predicted=None) == ("matmul" if measured.mfu > 0.5 else "unknown")
    assert bound(predicted=None, peaks=dataclasses.replace(measured.peaks, flops_per_s=1e15)) == "unknown"


def test_in_words(measured, monkeypatch):
    text = "\n".join(lines(measured))
    for words in (
        "8 x cpu (data=8), float32",
        "0 GFLOP/s a device (measured: a product here)",
        "30.0 GB/s",
        "256 tokens a step: 16 rows of 16, in one piece",
        "compiled in 1.50 s, 3.0 MiB a device",
        "1.02K tokens/s, MFU",
        "a step takes 250 ms (median of 11 steps, 200 ms to 500 ms)",
        "waiting for data 0.1%",
        "bound by passes over memory",
        "its program is memory 60%, matmul 40% of 250 ms that podling foretells",
        "2.00M tokens/s, 1,953 times what the steps take",
        "1 prompt of 8 tokens: first token after 5.00 ms, then 500 tokens/s; bound by reading weights and cache, 50.0%",
        "8 prompts of 8 tokens: first token after 20.0 ms",
    ):
        assert words in text
    assert "other programs" not in text
    busy = dataclasses.replace(measured, predicted=None, unknown="nobody knows", others=9.0)
    text = "\n".join(lines(busy))
    assert "its parts are not known: nobody knows" in text
    assert "other programs kept 9.0 cores busy" in text
    published = Peak(4e6, "published float32 peak")
    text = "\n".join(lines(dataclasses.replace(measured, peaks=Peaks(3e6, "measured here", 1e9, published))))
    assert "(measured here), 75.0% of the published peak" in text


def test_peaks_of_a_cpu_are_shared_by_its_devices(monkeypatch):
    monkeypatch.setattr(device, "_measure_gemm", lambda chip: 8e11)
    monkeypatch.setattr("podling.measure.peaks.reading_s", lambda device, read_bytes, dtype: read_bytes / 8e9)
    peaks = measure_peaks(jax.devices(), jax.numpy.dtype("float32"))
    assert (peaks.flops_per_s, peaks.published) == (1e11, None)
    assert peaks.read_bytes_per_s == pytest.approx(1e9)


def test_reading_takes_as_long_as_there_are_bytes():
    small, large = (reading_s(jax.devices()[0], size, jax.numpy.dtype("float32")) for size in (2**22, 2**27))
    assert large > 4 * small > 0
