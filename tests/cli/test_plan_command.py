"""`podling plan`: what it answers without a compiler, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podling import topology
from podling.cli.main import main
from podling.config import DataConfig
from podling.data.prepare import prepare
from podling.errors import InputError

KEYS = (
    "fits chip devices model mesh micro_batch accumulation remat loss_chunk hbm_bytes hbm_limit_bytes step_s "
    "step_s_range tokens_per_s mfu tokens loss_range compile_s command runners_up"
)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "find_spec", lambda name: None)


def call(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    code = main(["plan", *args, "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


def test_a_gpu_by_its_figures(capfd: pytest.CaptureFixture[str]) -> None:
    code, found, _ = call(capfd, "--model", "gpt2", "--chip", "8xh100", "--budget", "9h")
    assert code == 0 and set(KEYS.split()) <= set(found)
    assert (found["fits"], found["chip"], found["devices"], found["model"]) == (True, "8xh100", 8, "gpt2")
    assert found["source"] == "estimate" and found["compile_s"] is None and found["compiled"] == 0
    low, high = found["step_s_range"]
    assert low < found["step_s"] < high
    assert found["tokens_per_s"] == pytest.approx(524288 / found["step_s"])
    assert found["tokens"] == found["steps"] * 524288
    assert found["steps"] * found["step_s"] == pytest.approx(found["budget"]["train_s"], rel=0.01)
    assert found["budget"]["train_s"] < 9 * 3600
    assert (
        found["command"].startswith("podling train --model gpt2 ") and f"--steps {found['steps']}" in found["command"]
    )
    rows = found["micro_batch"] * found["accumulation"]
    assert rows * 1024 == 524288
    slower = [other["step_s"] for other in found["runners_up"]]
    assert slower == sorted(slower)
    for other in found["runners_up"]:  # what is as fast to a hundredth needs more memory
        assert other["step_s"] >= found["step_s"] or (
            1.01 * other["step_s"] >= found["step_s"] and other["hbm_bytes"] >= found["hbm_bytes"]
        )


def test_tokens_and_the_steps_that_they_are_foretell_one_loss(capfd: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "gpt2", "--chip", "8xh100")
    _, by_tokens, _ = call(capfd, *model, "--tokens", str(4000 * 524288))
    _, by_steps, _ = call(capfd, *model, "--steps", "4000")
    for name in ("steps", "tokens", "loss_range"):
        assert by_tokens[name] == by_steps[name] and by_tokens[name]


def test_the_command_is_taken_by_train(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from podling.cli.train import read

    (tmp_path / "a.txt").write_text("words " * 1000)
    _, found, _ = call(
        capfd,
        "--model",
        "gpt2",
        "--chip",
        "8xh100",
        "--budget",
        "1h",
        "--data",
        str(tmp_path),
        "--model.dropout",
        "0.1",
    )
    import shlex

    config = read(shlex.split(found["command"])[2:])[2]
    assert (config.run.mesh, config.train.micro_batch) == (found["mesh"], found["micro_batch"])
    assert (config.train.remat, config.train.loss_chunk) == (found["remat"], found["loss_chunk"])
    assert (config.train.steps, config.model.dropout) == (found["steps"], 0.1)
    assert config.data.paths == (str(tmp_path),)


def test_what_is_given_is_held(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--mesh", "fsdp=8", "--train.micro-batch", "64", "--train.remat", "full", "--train.loss-chunk", "128")
    code, found, _ = call(capfd, "--model", "gpt2", "--chip", "8xh100", *flags)
    assert code == 0 and found["runners_up"] == []
    layout = [found[name] for name in ("mesh", "micro_batch", "accumulation", "remat", "loss_chunk")]
    assert layout == ["fsdp=8", 64, 8, "full", 128]
    code, found, _ = call(capfd, "--model", "gpt2", "--chip", "8xh100", "--mesh", "auto", "--batch-tokens", "65536")
    assert code == 0 and found["micro_batch"] * found["accumulation"] == 64 and found["batch_tokens"] == 65536


def test_without_the_tpu_compiler_it_is_an_estimate_and_says_how_to_get_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology.platform, "system", lambda: "Linux")
    monkeypatch.setattr(topology.platform, "machine", lambda: "x86_64")
    code, found, _ = call(capfd, "--model", "gpt2", "--chip", "v5e-8")
    assert (code, found["fits"], found["source"]) == (0, True, "estimate")
    assert any("pip install 'podling[tpu]'" in note and "Linux" not in note for note in found["notes"])
    monkeypatch.setattr(topology.platform, "system", lambda: "Darwin")
    _, found, _ = call(capfd, "--model", "gpt2", "--chip", "v5e-8")
    assert any("Linux x86-64" in note for note in found["notes"])
    assert main(["plan", "--model", "gpt2", "--chip", "v5e-8"]) == 0
    assert "an estimate: no compiler has seen this program" in capfd.readouterr().out


def test_a_model_that_does_not_fit_names_the_largest_that_does(capfd: pytest.CaptureFixture[str]) -> None:
    code, found, _ = call(capfd, "--model", "gpt2-xl", "--chip", "v5e-1")
    problem = found["error"]["problems"][0]
    assert code == 2 and "gpt2-xl does not fit v5e-1" in problem["what"] and "of 15.75 GiB" in problem["what"]
    assert "the largest preset that does" in problem["fix"] and "--model gpt2" in problem["fix"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "gpt2"], ["--chip", "nothing says what to plan for", "v5e-8"]),
        (["--chip", ""], ["nothing says what to plan for"]),
        (["--chip", "v5e-8"], ["nothing says which model", "--budget such as 9h"]),
        (["--chip", "h10"], ["there is no chip 'h10'", "did you mean h100"]),
        (["--chip", "v5e-9"], ["there is no v5e-9", "v5e-8, v5e-16"]),
        (["--chip", "v7e-8"], ["there is no chip 'v7e-8'", "did you mean v"]),
        (["--chip", "v5e:3x3"], ["there is no v5e:3x3", "v5e:2x4", "v5e:16x16"]),
        (
            ["--model", "gpt2", "--chip", "v5e-8", "--budget", "20s"],
            ["--budget", "20s is too short", "to compile", "to save a checkpoint"],
        ),
        (["--model", "gpt2", "--chip", "v5e-8", "--budget", "soon"], ["--budget", "'soon'"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--search-time", "soon"], ["--search-time", "'soon'"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--tokenizer", "char"], ["--tokenizer", "--model.vocab-size"]),
        (["--chip", "v5e-8", "--budget", "9h", "--tokenizer", "char"], ["--tokenizer", "--model.vocab-size"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--tokenizer", "no.json"], ["no.json"]),
        (["--model", "gpt3", "--chip", "v5e-8"], ["there is no preset 'gpt3'", "did you mean gpt2"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--mesh", "data=4"], ["is 4 devices, and there are 8"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--mesh", "tensor=8"], ["12 heads do not divide", "nearest --mesh"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--mesh", "tensr=8"], ["unknown axis", "did you mean tensor"]),
        (
            ["--model", "gpt2", "--chip", "v5e-8", "--train.micro-batch", "3"],
            ["--train.micro-batch", "3 does not divide"],
        ),
        (
            ["--model", "gpt2-xl", "--chip", "v5e-8", "--train.micro-batch", "4"],
            ["4 rows at a time", "--train.micro-batch 8 or 16"],
        ),
        (["--model", "gpt2", "--chip", "v5e-8", "--batch-tokens", "1000"], ["not a multiple of the context"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--compiles", "0"], ["--compiles", "less than 1"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--budget", "9h", "--steps", "9"], ["--steps", "with --budget"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--device", "gpu"], ["--device", "gpu is not what v5e-8 is"]),
        (
            ["--model", "gpt2", "--chip", "2xv5e-4", "--mesh", "fsdp=8"],
            ["data=1 is no multiple of 2", "nearest --mesh: data=2,fsdp=4"],
        ),
        (["--model", "gpt2", "--chip", "v5e-8", "--svg", "a.svg"], ["--svg", "add --scaling"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--scaling", "--svg", "a.png"], ["a.png does not end in .svg"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--scaling", "--mesh", "data=8"], ["--mesh", "--scaling plans many"]),
        (["--model", "gpt2", "--chip", "cpu", "--scaling"], ["--scaling", "share"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--cache", f"{__file__}/x"], ["--cache", "test_plan_command.py"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--cache", ""], ["--cache", "is empty"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--data", "nowhere"], ["nowhere", "does not exist"]),
        (["--model", "gpt2", "--chip", "v5e-8", "--config", "no.json"], ["no.json"]),
        (["--model", "gpt2", "--chips", "v5e-8"], ["--chips", "did you mean --chip?"]),
        (["--chip", "v5e-8", "--budget", "x", "--lr", "-1", "--mesh", "a=1"], ["--budget", "--lr", "--mesh"]),
    ],
)
def test_what_it_refuses(capfd: pytest.CaptureFixture[str], args: list[str], words: list[str]) -> None:
    code, found, _ = call(capfd, *args)
    text = json.dumps(found, ensure_ascii=False)
    assert code == 2, found
    for word in words:
        assert word in text


def test_a_vocabulary_of_another_size_is_refused_in_the_words_of_train(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from podling.cli.train import read
    from podling.train.progress import QuietReporter
    from podling.train.start import prepare_data

    (tmp_path / "a.txt").write_text("words and more words\n\n" * 1000)
    flags = ["--model", "gpt2-nano", "--data", str(tmp_path / "a.txt"), "--data.cache", str(tmp_path / "cache")]
    flags += ["--tokenizer", "bytes", "--model.vocab-size", "60000"]
    with pytest.raises(InputError) as train:
        prepare_data(read(flags)[2], QuietReporter())
    code, found, _ = call(capfd, "--chip", "h100", *flags)
    (problem,) = found["error"]["problems"]
    assert code == 2
    assert (problem["where"], problem["what"], problem["fix"]) == tuple(vars(train.value.problems[0]).values())
    for tokenizer, size in ((["gpt2"], 50257), (["bpe", "--vocab-size", "2000"], 2000)):
        args = ("--model", "gpt2", "--chip", "h100", "--tokenizer", *tokenizer, "--model.vocab-size")
        code, found, _ = call(capfd, *args, "60000")
        assert code == 2 and f"is 60000, and the tokenizer has {size} tokens" in json.dumps(found)
        code, found, _ = call(capfd, *args, str(size))
        assert code == 0 and "--model.vocab-size" not in found["command"]
    code, found, _ = call(capfd, "--model", "gpt2", "--chip", "h100", "--tokenizer", "char", "--model.vocab-size", "99")
    assert code == 0 and "--model.vocab-size 99" in found["command"]


def test_prepared_data_made_otherwise_is_refused_in_the_words_of_train(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"the {number}th of many lines\n\n" for number in range(3000)))
    made = prepare(DataConfig(paths=(str(tmp_path / "a.txt"),), vocab_size=270), tmp_path / "prepared", None)
    args = ("--model", "gpt2-mini", "--chip", "h100", "--data", str(made))
    for given in (["--tokenizer", "gpt2"], ["--vocab-size", "2000"], ["--data.holdout", "0.2"]):
        code, found, _ = call(capfd, *args, *given)
        assert code == 2 and "was prepared with" in found["error"]["problems"][0]["what"], given
    code, found, _ = call(capfd, *args, "--tokenizer", "bpe", "--model.vocab-size", "270")
    assert code == 0 and "--vocab-size 270" in found["command"] and "--model.vocab-size" not in found["command"]


@pytest.mark.parametrize("given", [["--model.layers", "30"], ["--context", "2048"], ["--config", "FILE"]])
def test_without_a_preset_gpt2_is_changed(capfd: pytest.CaptureFixture[str], tmp_path: Path, given: list[str]) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"train": {"seed": 7}, "model": {"layers": 10}}))
    given = [word.replace("FILE", str(file)) for word in given]
    code, found, _ = call(capfd, "--chip", "8xh100", *given)
    assert code == 0 and found["preset"] == "gpt2" and found["batch_tokens"] == 524288
    assert any("no --model is given: planned from gpt2" in note for note in found["notes"])
    if given[0] == "--config":
        assert "--seed 7" in found["command"] and "--model.layers 10" in found["command"]
    else:
        assert " ".join(given) in found["command"]
    _, found, _ = call(capfd, "--chip", "8xh100", "--model", "gpt2", *given)
    assert not any("no --model" in note for note in found["notes"])


def test_a_warm_up_is_judged_by_the_steps_of_the_budget(capfd: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "gpt2", "--chip", "8xh100", "--optimizer.warmup-steps", "20000")
    code, found, _ = call(capfd, *args, "--budget", "9h")
    assert code == 0 and found["steps"] > 20000 and "--optimizer.warmup-steps 20000" in found["command"]
    code, found, _ = call(capfd, *args, "--budget", "20m")
    assert code == 2 and "that the budget has time for" in json.dumps(found)
    code, found, _ = call(capfd, *args)
    assert code == 2 and "longer than the run of 19073" in json.dumps(found)


def test_the_command_asks_for_data_where_the_model_is_too_large_for_the_default_text(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for model, asks in (("gpt2", True), ("gpt2-mini", True), ("gpt2-micro", False), ("gpt2-nano", False)):
        _, found, _ = call(capfd, "--model", model, "--chip", "h100", "--tokenizer", "bytes")
        assert found["command"].endswith("--data PATH") == asks, model


def test_what_cannot_be_is_answered_without_jax() -> None:
    code = (
        "import sys; from podling.cli.main import main;"
        "code = main('plan --model gpt2 --chip v5e-9 --budget soon --svg x'.split());"
        "print(code, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False", "False"], done.stderr
    assert "stopped, 4 problems" in done.stderr


def test_epochs_of_prepared_data_and_of_text(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"the {number}th of many texts, all alike. " * 400)
    made = prepare(DataConfig(paths=(str(tmp_path),), vocab_size=270), tmp_path / "prepared", None)
    args = ("--model", "gpt2-mini", "--chip", "h100", "--budget", "1h")
    _, found, _ = call(capfd, *args, "--data", str(made))
    tokens = json.loads((made / "manifest.json").read_text())["splits"]["train"]["tokens"]
    assert found["epochs"] == pytest.approx(found["tokens"] / tokens)
    assert not any("guess" in note for note in found["notes"])
    code, guessed, _ = call(capfd, *args, "--data", str(tmp_path / "1.txt"))
    assert code == 0 and guessed["epochs"] > found["epochs"]
    assert any("a guess; podling prepare counts them" in note for note in guessed["notes"])
    _, unknown, _ = call(capfd, *args)
    assert unknown["epochs"] is None


def test_scaling_and_its_picture(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "scaling.svg"
    code, found, _ = call(capfd, "--model", "gpt2", "--chip", "8xh100", "--scaling", "--svg", str(file))
    assert code == 0
    for how in ("strong", "weak"):
        assert [point["devices"] for point in found["scaling"][how]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    same = next(point for point in found["scaling"]["strong"] if point["devices"] == 8)
    assert same["step_s"] == found["step_s"] and same["mesh"] == found["mesh"]
    weak = found["scaling"]["weak"]
    assert weak[0]["batch_tokens"] * 256 == weak[-1]["batch_tokens"]
    assert file.read_text().startswith("<svg") and "h100" in file.read_text()
    code = main(["plan", "--model", "gpt2", "--chip", "8xh100", "--scaling"])
    out, _ = capfd.readouterr()
    assert code == 0 and "strong scaling" in out and "weak scaling" in out


def test_a_budget_without_a_model_chooses_the_size(capfd: pytest.CaptureFixture[str]) -> None:
    code, hours, _ = call(capfd, "--chip", "8xh100", "--budget", "9h")
    assert code == 0 and len(hours["sizes"]) > 3
    losses = [sum(size["loss_range"]) for size in hours["sizes"] if size["fits"] and size["loss_range"]]
    by_law = [size["law_loss"] for size in hours["sizes"] if size["law_loss"] is not None]
    assert by_law == sorted(by_law) and len(by_law) == len(losses)
    assert not any(size["compiled"] for size in hours["sizes"])
    assert losses == sorted(losses) and hours["params"] == hours["sizes"][0]["params"]
    code, minutes, _ = call(capfd, "--chip", "8xh100", "--budget", "30m")
    assert code == 0 and minutes["params"] < hours["params"]


def test_a_log_is_told_what_happens(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2", "--chip", "h100"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("planning for h100") and "run it:\n  podling train --model gpt2" in out
    assert "\x1b" not in out and not err


def test_help_names_what_it_takes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    out, _ = capfd.readouterr()
    for word in ("--chip", "--budget", "--compiles", "--scaling", "--train.remat", "podling plan --chip v5e-1"):
        assert word in out


def test_a_plan_is_made_on_the_cpu_whatever_the_environment_says() -> None:
    code = (
        "import sys; from podling.cli.main import main;"
        "code = main('plan --model gpt2 --chip h100 --json'.split());"
        "import jax; print(code, jax.devices()[0].platform, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "tpu"}, capture_output=True, text=True
    )
    assert done.stderr.split()[-2:] == ["0", "cpu"], done.stderr
