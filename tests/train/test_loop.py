"""Whole runs in this process: from text to a summary, stopped, continued, refused."""

import dataclasses
import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from collector import Collector

from podling.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from podling.errors import InputError, Interrupted, RunError
from podling.model.spec import param_count
from podling.parallel import device
from podling.parallel.mesh import make_mesh
from podling.run.checkpoint import Checkpoints, hash_state
from podling.run.folder import RunFolder, load_run
from podling.run.metrics import read_records
from podling.train.start import train
from podling.train.step import init_state

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS = 12
SUMMARY = (
    "run params tokens steps train_loss val_loss val_bits_per_byte unigram_loss bigram_loss tokens_per_s mfu"
    " data_wait_share retraces wall_s export"
).split()
RECORD = "step loss lr grad_norm tokens step_s tokens_per_s mfu data_wait_share left_s elapsed_s retraces".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    draw = random.Random(0)
    subjects, verbs, objects = ("the cat", "a dog", "this bird"), ("sees", "hears", "follows"), ("a mouse", "the ball")
    sentences = (f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}." for _ in range(1500))
    path = tmp_path_factory.mktemp("text") / "animals.txt"
    path.write_text("\n".join(sentences))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def config(text, cache, tmp_path, monkeypatch) -> Config:
    """As the unbroken run, whose compiled programs it finds, without what comes at the end."""
    monkeypatch.setattr(device, "_measure_gemm", lambda chip: 1e11)
    config = make_config(text, cache, tmp_path / "run")
    return change(change(config, "train", samples=0), "run", export=False)


def make_config(text: Path, cache: Path, out: Path) -> Config:
    """Sixteen rows a step on eight devices, a checkpoint every four steps, an evaluation every six."""
    return Config(
        model=ModelConfig(preset="gpt2-nano", layers=1, heads=2, embed=16, mlp=32, context=16, dropout=0.1),
        data=DataConfig(paths=(str(text),), tokenizer="bytes", cache=str(cache)),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
        train=TrainConfig(steps=STEPS, batch_tokens=256, eval_every=6, eval_tokens=1024, samples=2),
        run=RunConfig(out=str(out), checkpoint_every=4, keep=2, tensorboard=False),
    )


def change(config: Config, section: str, **fields: Any) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


@pytest.fixture(scope="module")
def unbroken(text, cache, tmp_path_factory) -> tuple[Config, dict[str, Any], Collector]:
    """One run left in peace, which many tests read and none changes."""
    config, reporter = make_config(text, cache, tmp_path_factory.mktemp("runs") / "unbroken"), Collector()
    return config, train(config, reporter), reporter


def final_hash(out: str) -> str:
    config, paths = load_run(Path(out))
    with jax.set_mesh(make_mesh("data=1", jax.devices()[:1])):
        shapes = jax.eval_shape(lambda: init_state(config))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    checkpoints = Checkpoints(paths.checkpoints)
    state, meta = checkpoints.restore(None, like, pytest.fail)
    checkpoints.close()
    assert meta["step"] == STEPS
    return hash_state(state)


def losses(out: str) -> list[tuple[int, float]]:
    records, broken = read_records(Path(out) / "metrics.jsonl")
    assert broken == []
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def heldout_losses(out: str) -> list[tuple[int, float]]:
    records, _ = read_records(Path(out) / "metrics.jsonl")
    return [(record["step"], record["val_loss"]) for record in records if "val_loss" in record]


def test_the_summary_of_a_whole_run(unbroken):
    config, summary, reporter = unbroken
    assert set(SUMMARY) <= set(summary)
    assert reporter.summaries == [summary] and json.loads(json.dumps(summary)) == summary
    model = load_run(Path(config.run.out))[0].model
    assert model.vocab_size == 257
    assert (summary["run"], summary["steps"]) == (config.run.out, STEPS)
    assert summary["tokens"] == STEPS * 256 and summary["params"] == param_count(model)
    assert summary["train_loss"] == pytest.approx(np.mean([loss for _, loss in losses(config.run.out)]))
    assert summary["val_loss"] == reporter.evaluations[-1]["val_loss"]
    assert summary["val_loss"] < 0.8 * math.log(257)
    assert 1 < summary["bigram_loss"] < summary["unigram_loss"] < math.log(257)
    # Byte tokens: bits per byte are bits per token, but for end-of-text, which stands for no byte.
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2), rel=0.01)
    assert summary["val_perplexity"] == pytest.approx(math.exp(summary["val_loss"]))
    assert summary["retraces"] == 0
    assert 0 < summary["mfu"] < 1 and 0 <= summary["data_wait_share"] <= 1
    # Eleven of the twelve steps are timed: the first one compiles.
    assert summary["tokens_per_s"] == pytest.approx(11 * 256 / summary["train_s"])
    assert summary["wall_s"] > summary["train_s"] > 0


def test_every_step_is_recorded_once_with_all_figures(unbroken):
    config, _, reporter = unbroken
    records, broken = read_records(Path(config.run.out) / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    assert broken == [] and [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert all(set(record) == set(RECORD) for record in steps)
    assert steps == reporter.steps
    assert [record["tokens"] for record in steps] == [256 * step for step in range(1, STEPS + 1)]
    assert [record["lr"] for record in steps[:3]] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert steps[0]["step_s"] is None and all(record["step_s"] > 0 for record in steps[1:])
    assert steps[-1]["left_s"] == 0
    elapsed = [record["elapsed_s"] for record in steps]
    assert elapsed == sorted(elapsed)


def test_evaluations_come_when_due_and_once_at_the_end(unbroken):
    config, _, reporter = unbroken
    assert [record["step"] for record in reporter.evaluations] == [6, STEPS]
    records, _ = read_records(Path(config.run.out) / "metrics.jsonl")
    assert [record for record in records if "val_loss" in record] == reporter.evaluations
    assert reporter.evaluations[1]["val_loss"] < reporter.evaluations[0]["val_loss"]


def test_a_run_says_what_a_person_would_ask(unbroken):
    config, _, reporter = unbroken
    assert "device: 8 x cpu (data 8), float32" in reporter.text
    assert "batch: 256 tokens a step: 16 rows of 16, in one piece" in reporter.text
    assert f"checkpoints: {config.run.out}/checkpoints" in reporter.text
    assert any("compiling" in status for status in reporter.statuses)
    (began,) = reporter.began
    assert began[:2] == (STEPS, 0) and began[2].bigram_loss > 1


def test_a_run_leaves_what_people_use(unbroken):
    config, summary, reporter = unbroken
    out = Path(config.run.out)
    assert sorted(path.name for path in (out / "samples").iterdir()) == ["000.txt", "001.txt"]
    assert reporter.samples == [(out / "samples" / "000.txt").read_text()]
    assert summary["export"] == str(out / "export") and (out / "export" / "model.safetensors").is_file()
    kept = Checkpoints(out / "checkpoints")
    assert kept.steps() == [8, 12] and kept.best() == 12
    kept.close()
    assert (out / "tokenizer.json").is_file()


def test_the_same_call_on_a_finished_run_returns_its_summary(unbroken):
    config, summary, _ = unbroken
    again = Collector()
    before = {path: path.stat().st_mtime_ns for path in Path(config.run.out).rglob("*") if path.name != "lock"}
    assert train(config, again) == summary
    assert again.steps == [] and again.summaries == [summary] and "is finished" in again.text
    # Nothing is computed on this mesh, nor is it looked at: it is no news, and not saved.
    other, again = change(change(config, "run", mesh="fsdp=800", keep=9), "train", eval_every=1), Collector()
    assert train(other, again) == summary and "--mesh" not in again.text
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_configuration_is_refused_by_name(unbroken):
    config, _, _ = unbroken
    other = change(change(config, "model", layers=2), "optimizer", lr=5e-3)
    before = (Path(config.run.out) / "config.json").read_bytes()
    with pytest.raises(InputError) as error:
        train(other, Collector())
    assert "--model.layers: 1 → 2" in str(error.value) and "--lr: 0.01 → 0.005" in str(error.value)
    assert "another configuration" in str(error.value)
    assert (Path(config.run.out) / "config.json").read_bytes() == before


def interrupted(config: Config, at: int, number: signal.Signals = signal.SIGTERM) -> Interrupted:
    def kill(step: int) -> None:
        if step == at:
            os.kill(os.getpid(), number)

    reporter = Collector(kill)
    with pytest.raises(Interrupted) as error:
        train(config, reporter)
    assert reporter.summaries == []
    return error.value


def test_a_stopped_and_continued_run_is_bit_equal_to_an_unbroken_one(config, unbroken):
    """With dropout, an evaluation on each side of the cut, and a cut that is on no checkpoint's step."""
    handler = signal.getsignal(signal.SIGTERM)
    stopped = interrupted(config, at=5)
    assert stopped.exit_code == 143
    assert "everything up to here is saved" in str(stopped) and f"--resume {config.run.out}" in str(stopped)
    assert signal.getsignal(signal.SIGTERM) is handler
    # The step after the one reported was already on its way: it is finished and saved too.
    done = losses(config.run.out)[-1][0]
    assert done == 6
    for mesh in ("data=3", "fsdp=8,tensor=2"):  # refused by the devices: the run stays what it was
        with pytest.raises(InputError, match="mesh"):
            train(change(config, "run", mesh=mesh, log_every=7), Collector())
        assert load_run(Path(config.run.out))[0].run == config.run
    reporter = Collector()
    summary = train(change(config, "run", log_every=7), reporter)
    assert load_run(Path(config.run.out))[0].run == dataclasses.replace(config.run, log_every=7)
    assert f"resuming after step {done} of {STEPS}" in reporter.text
    assert "not bit-equal" not in reporter.text
    assert reporter.steps[0]["step"] == done + 1
    whole, whole_summary, _ = unbroken
    assert losses(config.run.out) == losses(whole.run.out)
    assert final_hash(config.run.out) == final_hash(whole.run.out)
    # The evaluation after step 6 fell to the signal, and was made up for.
    assert heldout_losses(config.run.out) == heldout_losses(whole.run.out)
    for key in ("val_loss", "train_loss", "bigram_loss", "tokens", "val_bits_per_byte"):
        assert summary[key] == whole_summary[key], key
    # Figures of time are of both sessions: of each one's six steps five are timed, as the first one compiles.
    assert summary["tokens_per_s"] == pytest.approx(10 * 256 / summary["train_s"])
    elapsed = [
        record["elapsed_s"] for record in read_records(Path(config.run.out) / "metrics.jsonl")[0] if "loss" in record
    ]
    assert elapsed == sorted(elapsed) and summary["wall_s"] > elapsed[-1]


def test_ctrl_c_in_the_last_step_is_answered_and_the_rest_is_done_later(config, unbroken):
    assert interrupted(config, at=STEPS, number=signal.SIGINT).exit_code == 130
    assert not (Path(config.run.out) / "summary.json").exists()
    reporter = Collector()
    summary = train(config, reporter)
    assert reporter.steps == [] and summary["val_loss"] == unbroken[1]["val_loss"]
    assert final_hash(config.run.out) == final_hash(unbroken[0].run.out)


def test_a_signal_in_the_last_evaluation_is_answered(config):
    """What is left then (samples, export) may take minutes."""

    class Impatient(Collector):
        def evaluation(self, record: dict[str, Any]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as error:
        train(change(config, "train", eval_every=0), Impatient())
    assert "step 12" in str(error.value)
    kept = Checkpoints(Path(config.run.out) / "checkpoints")
    assert kept.latest() == STEPS and not (Path(config.run.out) / "summary.json").exists()
    kept.close()


def test_a_loss_that_is_not_finite_stops_with_step_documents_and_a_good_checkpoint(config, monkeypatch):
    """Infinite weights in the batch of step 6 (counted from 1), two steps after the checkpoint."""
    from podling.data.batches import Batches

    make = Batches.batch

    def spoiled(self, step):
        batch = make(self, step)
        if step == 5:
            batch.weights[:] = np.inf
        return batch

    monkeypatch.setattr(Batches, "batch", spoiled)
    reporter = Collector()
    with pytest.raises(RunError) as error:
        train(config, reporter)
    assert error.value.exit_code == 1
    text = str(error.value)
    assert "step 6" in text and "not finite" in text and "animals.txt" in text
    assert "the checkpoint of step 4 is good" in text and "--lr (now 0.01)" in text
    assert [record["step"] for record in reporter.steps] == [1, 2, 3, 4, 5, 6]
    kept = Checkpoints(Path(config.run.out) / "checkpoints")
    assert kept.steps() == [4]
    kept.close()
    monkeypatch.undo()  # the batch was at fault and not the state: the run goes on from the checkpoint
    assert train(config, Collector())["steps"] == STEPS


def test_an_absurd_learning_rate_never_saves_a_state_that_is_not_finite(config):
    config = change(change(config, "optimizer", lr=1e30, clip_norm=0.0), "run", checkpoint_every=1)
    with pytest.raises(RunError, match="not finite"):
        train(config, Collector())
    out = Path(config.run.out)
    settled, paths = load_run(out)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: init_state(settled))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    checkpoints = Checkpoints(paths.checkpoints)
    for step in checkpoints.steps():
        state, _ = checkpoints.restore(step, like, pytest.fail)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert checkpoints.steps()
    checkpoints.close()


def test_no_evaluation_in_between_and_nothing_extra_at_the_end(config, unbroken):
    """What is only watched changes nothing that is computed."""
    config = change(change(config, "train", eval_every=0), "run", checkpoint_every=0)
    reporter = Collector()
    summary = train(config, reporter)
    assert [record["step"] for record in reporter.evaluations] == [STEPS]
    assert summary["export"] is None and reporter.samples == []
    assert not (Path(config.run.out) / "export").exists() and not (Path(config.run.out) / "samples").exists()
    assert losses(config.run.out) == losses(unbroken[0].run.out)
    assert final_hash(config.run.out) == final_hash(unbroken[0].run.out)


def test_a_mesh_of_all_three_axes_with_accumulation_and_chunks(config, unbroken):
    """The same run on data 2 x fsdp 2 x tensor 2 in two micro-batches; without dropout, whose masks differ by cut."""
    plain = change(config, "model", dropout=0.0)
    spread = change(change(plain, "run", mesh="data=2,fsdp=2,tensor=2"), "train", micro_batch=8, loss_chunk=4)
    spread = change(change(spread, "run", out=f"{config.run.out}-spread"), "train", remat="full")
    summaries, reporter = [train(plain, Collector())], Collector()
    summaries.append(train(spread, reporter))
    assert "device: 8 x cpu (data 2, fsdp 2, tensor 2), float32" in reporter.text
    assert "2 micro-batches of 8 rows" in reporter.text
    np.testing.assert_allclose(losses(spread.run.out), losses(plain.run.out), rtol=2e-5)
    assert summaries[0]["val_loss"] == pytest.approx(summaries[1]["val_loss"], rel=2e-5)
    assert summaries[1]["retraces"] == 0


def test_tokens_instead_of_steps_are_rounded_up(config):
    reporter = Collector()
    summary = train(change(config, "train", steps=99, tokens=11 * 256 + 1), reporter)
    assert summary["steps"] == STEPS and summary["tokens"] == STEPS * 256
    assert "2,817 tokens are 12 steps of 256" in reporter.text


def test_a_run_refused_by_the_devices_leaves_its_folder_free(config):
    """All that does not divide is named at once, and the corrected command is not `another configuration`."""
    wrong = change(change(config, "run", mesh="data=2,tensor=4"), "train", batch_tokens=16 * 5)
    with pytest.raises(InputError) as error:
        train(wrong, Collector())
    text = str(error.value)
    assert "--batch-tokens" in text and "--model.heads: 2 heads do not divide over tensor=4" in text
    out = Path(config.run.out)
    assert not out.exists(), "a run that never began leaves nothing"
    with RunFolder.open(out, change(config, "model", vocab_size=257), {}) as folder:
        assert folder.is_new


def test_starting_from_a_finished_run(config, unbroken):
    """Its weights, and nothing else of it: not its step, its moments or its place in the schedule."""
    source, source_summary, source_reporter = unbroken
    reporter = Collector()
    train(change(config, "run", init=source.run.out), reporter)
    assert f"starting from {source.run.out}, step 12" in reporter.text
    assert reporter.steps[0]["loss"] == pytest.approx(source_summary["val_loss"], abs=0.3)
    assert source_reporter.steps[0]["loss"] > source_summary["val_loss"] + 1
    assert [record["step"] for record in reporter.steps] == list(range(1, STEPS + 1))
    assert reporter.steps[0]["lr"] == source_reporter.steps[0]["lr"]


def test_starting_from_another_model_or_tokenizer_is_refused(config, unbroken):
    source = unbroken[0].run.out
    other = change(change(config, "run", init=source), "model", embed=32, layers=2)
    other = change(other, "data", tokenizer="char")
    with pytest.raises(InputError) as error:
        train(other, Collector())
    text = str(error.value)
    for difference in ("layers is 1, this run's is 2", "embed is 16, this run's is 32", "vocab_size is 257"):
        assert f"--init {source}: {difference}" in text
    assert "its tokenizer is not this run's" in text
    assert train(config, Collector())["steps"] == STEPS  # the folder is free
