"""The step compiled ahead of the run, and what is said of its time before and after."""

import dataclasses
import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from collector import Collector

from podling.cost.hbm import memory_stats
from podling.cost.records import StepTime
from podling.errors import RunError
from podling.run.compile_cache import CompileCache
from podling.run.folder import RunFolder
from podling.train import devices, earlier, prediction, session, setup
from podling.train.meter import Meter
from podling.train.prediction import Forecast, compile_and_foretell, for_summary
from podling.train.progress.words import held_against, seconds
from podling.train.start import prepare_data, train
from podling.train.together import Together

pytestmark = pytest.mark.usefixtures("quick_compile")

FORETOLD = StepTime(0.08, (0.07, 0.09), {"matmul": 0.06, "memory": 0.02}, "made up")
FACTS = {"step_s": 0.08, "step_s_range": [0.07, 0.09], "tokens_per_s": 3200.0, "calibration": "made up"}
FACTS |= {"parts_s": {"matmul": 0.06, "compute": 0.0, "memory": 0.02, "collective": 0.0}}


@pytest.fixture
def one_device(monkeypatch) -> None:
    for module in (setup, devices):
        monkeypatch.setattr(module, "select_devices", lambda asked: jax.devices()[:1])
    monkeypatch.setattr(session, "peak_flops", lambda *_: session.Peak(1e11, "made up"))


@pytest.fixture
def open_run(make_run, tmp_path, one_device):
    """A session on one device with a folder for it."""
    config, prepared = prepare_data(make_run(tmp_path / "run"), Collector())
    opened = session.Session.open(config, prepared, Collector())
    with RunFolder.open(tmp_path / "run", config, {}) as folder, jax.set_mesh(opened.mesh):
        yield opened, folder, CompileCache(folder.paths.compile_cache)


def foretell(open_run) -> tuple[Forecast, Collector]:
    opened, folder, programs = open_run
    reporter = Collector()
    found = compile_and_foretell(opened, programs, folder, reporter, Together())
    assert found is not None and json.loads(folder.paths.prediction.read_text()) == found.facts
    assert found.facts["compile_s"] > 0 and found.facts["devices"] == opened.mesh.size
    assert reporter.statuses[0] == "compiling the training step" and found.said in reporter.said
    return found, reporter


def test_the_first_step_neither_traces_nor_compiles_again(open_run, monkeypatch):
    monkeypatch.setattr(prediction, "predict_step", lambda *_: FORETOLD)
    opened = open_run[0]
    foretell(open_run)
    state, batch = opened.init_state(), opened.batches.batch(0)
    jax.block_until_ready(opened.put(batch))
    told = []
    listen = lambda event, *_, **__: told.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state, _ = opened.step(state, batch)
        jax.block_until_ready(state)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in told if "trace" in event or "compile" in event]
    assert opened.counter.retraces == 0 and int(state.step) == 1


def test_a_prediction_is_kept_and_said(open_run, monkeypatch):
    monkeypatch.setattr(prediction, "predict_step", lambda *_: FORETOLD)
    found, _ = foretell(open_run)
    tokens = open_run[0].plan.tokens
    assert {key: found.facts[key] for key in FACTS} == FACTS | {"tokens_per_s": tokens / 0.08}
    assert found.said == (
        "predicted: 80.0 ms a step (70.0 ms to 90.0 ms), 3.20K tokens/s (matmul 75%, memory 25%); made up"
    )


def test_a_step_that_the_devices_cannot_hold_is_refused_in_words(open_run):
    opened, folder, programs = open_run
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    text += "Used 22.15G of 15.75G hbm. Exceeded hbm capacity by 6.41G."

    class TooLarge:
        mesh = opened.mesh

        def compile_step(self):
            raise jax.errors.JaxRuntimeError(text)

    with pytest.raises(RunError, match=r"(?s)compiling the training step: .*22.15 GiB.*--train.micro-batch"):
        compile_and_foretell(TooLarge(), programs, folder, Collector(), Together())  # type: ignore[arg-type]
    text = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_and_foretell(TooLarge(), programs, folder, Collector(), Together())  # type: ignore[arg-type]


def test_a_step_that_this_machine_cannot_hold_is_refused_before_it_runs(open_run, monkeypatch):
    """It was foretold, and ended in a traceback; half of the memory, which podling plans with, is no limit."""
    opened, folder, programs = open_run
    need = memory_stats(opened.compile_step()).total_bytes
    monkeypatch.setattr(prediction, "machine_memory_bytes", lambda: need)
    monkeypatch.setattr(prediction, "predict_step", lambda *_: FORETOLD)
    foretell(open_run)
    folder.paths.prediction.unlink()
    monkeypatch.setattr(prediction, "machine_memory_bytes", lambda: need - 1)
    words = r"the training step: the step needs .*iB, and this machine has .*iB of memory.*\n.*--train.micro-batch"
    with pytest.raises(RunError, match=words):
        compile_and_foretell(opened, programs, folder, Collector(), Together())
    assert not folder.paths.prediction.exists()
    monkeypatch.setattr(prediction, "machine_memory_bytes", lambda: 2 * need - 1)
    with pytest.raises(RunError, match="of memory"):  # both processes of this machine need as much
        compile_and_foretell(dataclasses.replace(opened, processes_here=2), programs, folder, Collector(), Together())


def test_a_run_that_only_has_to_finish_keeps_the_prediction_of_the_session_before(open_run):
    """Killed after the last step, its summary had none."""
    folder, meter = open_run[1], Meter(100, 10, None)
    meter.restore({"steps": 4, "train_s": 0.4, "wait_s": 0.0})
    assert for_summary(None, meter, folder) is None
    folder.paths.prediction.write_text("{")
    assert for_summary(None, meter, folder) is None
    folder.paths.prediction.write_text(json.dumps(FACTS))
    told = for_summary(None, meter, folder)
    assert told == Forecast(FACTS).beside(0.1) and told["measured_over_predicted"] == pytest.approx(1.25)
    meter = Meter(100, 10, None)
    assert for_summary(None, meter, folder) == Forecast(FACTS).beside(None)


def test_what_a_session_that_goes_on_measures_is_its_own(open_run):
    now = iter([10.0, 10.2])
    meter = Meter(100, 10, None, clock=lambda: next(now))
    meter.restore({"steps": 4, "train_s": 0.4, "wait_s": 0.0})
    meter.resume()
    meter.step(0.0)
    told = for_summary(Forecast(FACTS), meter, open_run[1])
    assert told is not None and told["measured_step_s"] == pytest.approx(0.2)
    assert "measured 200 ms in this session: took 150% longer" in held_against(told)


def test_the_same_program_on_the_same_machine_is_not_measured_again(open_run, monkeypatch, tmp_path):
    boot, asked = tmp_path / "boot_id", []
    boot.write_text("this start of this machine")
    monkeypatch.setattr(earlier, "BOOT", boot)
    monkeypatch.setattr(prediction, "predict_step", lambda *_: asked.append(1) or FORETOLD)
    first, _ = foretell(open_run)
    again, _ = foretell(open_run)
    assert len(asked) == 1
    assert {name: again.facts[name] for name in FACTS} == {name: first.facts[name] for name in FACTS} == FACTS
    assert again.facts["measured"] == first.facts["made"] and again.said.startswith(first.said)
    boot.write_text("another")
    foretell(open_run)
    assert len(asked) == 2
    disturbed = dataclasses.replace(FORETOLD, range_s=(0.04, 0.16))
    monkeypatch.setattr(prediction, "predict_step", lambda *_: asked.append(1) or disturbed)
    boot.write_text("a third")
    for count in (3, 4):
        foretell(open_run)
        assert len(asked) == count
    boot.unlink()  # a system that tells no start from another
    for count in (5, 6):
        foretell(open_run)
        assert len(asked) == count


def test_a_program_is_the_same_when_it_comes_from_the_cache(tmp_path, monkeypatch):
    """Of a program that is read back, the lists of source files are others."""

    def text(files: str, places: str, much: str = "2") -> str:
        add = f'  ROOT %add.1 = f32[{much}]{{0}} add(%a.1, %a.1), metadata={{op_name="jit(f)/add" {places}}}'
        return "\n".join(["HloModule jit_f", "", "FileNames", files, "", "ENTRY %main.1 {", add, "}"])

    texts = text('1 "a.py"', "stack_frame_id=3"), text('1 "b.py"', "stack_frame_id=1"), text('1 "a.py"', "", "4")
    monkeypatch.setattr(earlier, "BOOT", tmp_path / "boot_id")
    earlier.BOOT.write_text("this start of this machine")
    cpu = jax.devices()[0]
    made = [earlier.basis(cpu, types.SimpleNamespace(as_text=lambda text=text: text)) for text in texts]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("error", [RuntimeError("no such thing"), prediction.NoPrediction("no such thing")])
def test_a_prediction_that_fails_is_said_and_stops_nothing(open_run, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(prediction, "predict_step", fail)
    found, _ = foretell(open_run)
    assert found.said.startswith("no prediction of the step's time: ") and found.said.endswith("no such thing")
    assert "step_s" not in found.facts and found.beside(0.1)["measured_over_predicted"] is None


def test_a_folder_that_cannot_be_written_stops_nothing(open_run, monkeypatch):
    monkeypatch.setattr(prediction, "predict_step", lambda *_: FORETOLD)
    opened, folder, programs = open_run
    folder.paths.prediction.mkdir()
    reporter = Collector()
    assert compile_and_foretell(opened, programs, folder, reporter, Together()) is not None
    assert any("prediction is not kept" in text for text in reporter.said)


def test_a_whole_run_on_this_cpu(make_run, tmp_path, one_device):
    """Measured, predicted, written before the first step, and held against the steps at the end."""
    out = tmp_path / "run"
    there: list[bool] = []
    reporter = Collector(at_step=lambda step: there.append((out / "prediction.json").exists()))
    summary = train(make_run(out), reporter)
    assert there and all(there)
    kept = json.loads((out / "prediction.json").read_text())
    assert kept["step_s"] > 0 and sum(kept["parts_s"].values()) == pytest.approx(kept["step_s"])
    told = summary["prediction"]
    assert {key: told[key] for key in kept} == kept
    assert told["measured_step_s"] == pytest.approx(summary["step_s"])
    assert told["measured_over_predicted"] == pytest.approx(summary["step_s"] / kept["step_s"])
    assert json.loads(Path(out / "summary.json").read_text())["prediction"] == told


def test_what_was_foretold_beside_what_was_measured():
    forecast = Forecast(FACTS)
    for measured_s, words in ((0.1, "took 25% longer than"), (0.04, "took 50% less time than"), (0.0801, "as")):
        said = held_against(forecast.beside(measured_s))
        shown = f"80.0 ms a step (70.0 ms to 90.0 ms), measured {seconds(measured_s)}: {words} predicted"
        assert said == shown
    assert ", measured 100 ms in this session: took 25%" in held_against(forecast.beside(0.1, part=True))
    assert held_against(forecast.beside(None)).endswith("(70.0 ms to 90.0 ms), and no step was timed")
    assert held_against(Forecast({"missing": "no reason"}).beside(0.1)) == "none: no reason"
    assert held_against(None) == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.08, "80.0 ms"), (1.234, "1.23 s"), (0.99996, "1.00 s"), (123.4, "123 s"), (1771.2, "1,771 s")],
)
def test_seconds(value, shown):
    assert seconds(value) == shown


class Chip:
    """Stands for a device that is not there."""

    platform, process_index, slice_index = "tpu", 0, 0

    def __init__(self, kind: str, platform: str = "tpu"):
        self.device_kind, self.platform = kind, platform


@pytest.mark.parametrize(("kind", "platform"), [("TPU v5 lite", "tpu"), ("NVIDIA H100 80GB HBM3", "gpu")])
def test_accelerators_go_by_their_chip(open_run, monkeypatch, kind, platform):
    """From the program on a TPU, from the model's sizes on a GPU."""
    opened = open_run[0]
    module = pytest.importorskip("podling.cost.step_time" if platform == "tpu" else "podling.cost.analytic")
    pytest.importorskip("podling.chips")
    asked = {}

    def answer(*positional, **named):
        asked.update(positional=positional, named=named)
        return FORETOLD

    monkeypatch.setattr(module, "step_time" if platform == "tpu" else "estimate_time", answer)
    mesh = FakeMesh(opened.mesh, Chip(kind, platform))
    compiled = opened.compile_step()
    assert prediction.predict_step(dataclasses.replace(opened, mesh=mesh), compiled, 1) is FORETOLD
    chips = [value for value in asked["positional"] if type(value).__name__ == "Chip"]
    assert [kind.startswith(prefix) for chip in chips for prefix in chip.device_kinds].count(True)


class FakeMesh:
    """A mesh of a device that is not there."""

    def __init__(self, mesh, device, size=1):
        self.shape, self.size = mesh.shape, size
        self.devices = np.array([device] * size, dtype=object)


@pytest.mark.parametrize(("processes", "why"), [(1, "8 devices share this CPU"), (4, "processes may share this CPU")])
def test_a_cpu_that_is_shared_is_not_foretold(open_run, processes, why):
    fake = dataclasses.replace(open_run[0], mesh=FakeMesh(open_run[0].mesh, Chip("cpu", "cpu"), size=8))
    with pytest.raises(prediction.NoPrediction, match=why):
        prediction.predict_step(fake, None, processes)  # type: ignore[arg-type]


def test_no_seconds_are_announced_for_a_prediction_that_cannot_be(open_run, monkeypatch):
    opened, folder, programs = open_run
    mesh = FakeMesh(opened.mesh, jax.devices()[0], size=8)
    fake = dataclasses.replace(opened, mesh=mesh)
    monkeypatch.setattr(prediction, "_compile", lambda _: opened.compile_step())
    reporter = Collector()
    found = compile_and_foretell(fake, programs, folder, reporter, Together())
    assert found is not None and "8 devices share this CPU" in found.said
    assert reporter.statuses == ["compiling the training step"]


def test_a_chip_that_no_table_has_is_said(open_run):
    pytest.importorskip("podling.chips")
    opened = open_run[0]
    fake = dataclasses.replace(opened, mesh=FakeMesh(opened.mesh, Chip("TPU v99")))
    with pytest.raises(prediction.NoPrediction, match="TPU v99 is not in podling's table of chips"):
        prediction.predict_step(fake, opened.compile_step(), 1)
