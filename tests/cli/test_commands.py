"""From text to an exported model and back, by the commands alone."""

import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podling.cli.main import main

SMALL = (
    "--model gpt2-nano --model.layers 1 --model.embed 32 --model.heads 2 --context 32 --tokenizer bytes"
    " --batch-tokens 512 --train.samples 2 --eval-every 0"
).split()
SUMMARY = (
    "run params tokens steps train_loss val_loss val_bits_per_byte unigram_loss bigram_loss tokens_per_s mfu"
    " data_wait_share retraces wall_s export"
).split()


def call(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    """Run a command in this process with `--json`: its exit code, its object, its stderr."""
    code = main([*args, "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a small grammar, the same on every machine."""
    draw = random.Random(0)
    subjects, verbs, objects = ("the cat", "a dog", "this bird"), ("sees", "hears", "follows"), ("a mouse", "the ball")
    sentences = (f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}." for _ in range(2000))
    path = tmp_path_factory.mktemp("text") / "animals.txt"
    path.write_text("\n".join(sentences), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run trained by the command, in a process of its own on eight devices: folder, summary and stderr."""
    run = tmp_path_factory.mktemp("runs") / "animals"
    done = subprocess.run(
        [sys.executable, "-m", "podling", "train", *SMALL, "--data", str(text), "--steps", "60", "--out", str(run),
         "--mesh", "data=4,tensor=2", "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return run, json.loads(line), done.stderr


def test_train_says_what_it_did(trained: tuple[Path, dict[str, Any], str]) -> None:
    run, summary, errors = trained
    assert set(SUMMARY) <= set(summary)
    assert (summary["run"], summary["steps"], summary["tokens"]) == (str(run), 60, 60 * 512)
    assert 0 < summary["val_loss"] < summary["unigram_loss"]
    assert summary["bigram_loss"] < summary["unigram_loss"]
    assert summary["retraces"] == 0
    assert json.loads((run / "summary.json").read_text()) == summary
    assert "8 x cpu (data 4, tensor 2)" in errors
    assert "Traceback" not in errors and "Warning" not in errors


def test_the_same_command_again_prints_the_summary(
    trained: tuple[Path, dict[str, Any], str], text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, summary, _ = trained
    assert call(capfd, "train", "--resume", str(run))[:2] == (0, summary)
    again = ("train", *SMALL, "--data", str(text), "--steps", "60", "--out", str(run), "--mesh", "data=4,tensor=2")
    assert call(capfd, *again)[:2] == (0, summary)


def test_another_configuration_is_refused(
    trained: tuple[Path, dict[str, Any], str], capfd: pytest.CaptureFixture[str]
) -> None:
    run, summary, _ = trained
    code, answer, _ = call(capfd, "train", "--resume", str(run), "--lr", "0.5", "--optimizer.beta2", "0.9")
    assert code == 2
    assert {"--lr", "--optimizer.beta2"} <= {problem["where"] for problem in answer["error"]["problems"]}
    assert json.loads((run / "summary.json").read_text()) == summary


def test_evaluate_repeats_the_summary(
    trained: tuple[Path, dict[str, Any], str], text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, summary, _ = trained
    code, figures, _ = call(capfd, "evaluate", str(run))
    assert code == 0
    assert figures["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert figures["val_bits_per_byte"] == pytest.approx(summary["val_bits_per_byte"], rel=1e-5)
    code, figures, _ = call(capfd, "evaluate", str(run), "--data", str(text))
    # The whole text: every byte but the first, and the end of text.
    assert figures["val_tokens"] == text.stat().st_size
    assert figures["val_loss"] == pytest.approx(summary["val_loss"], rel=0.05)


def test_generate(trained: tuple[Path, dict[str, Any], str], capfd: pytest.CaptureFixture[str]) -> None:
    run = str(trained[0])
    wanted = ("generate", run, "--max-tokens", "12", "--seed", "7")
    code, answer, _ = call(capfd, *wanted, "--prompt", "the cat ", "a dog ", "--samples", "2")
    assert code == 0
    texts = [completion["text"] for completion in answer["completions"]]
    assert [completion["prompt"] for completion in answer["completions"]] == ["the cat "] * 2 + ["a dog "] * 2
    assert len(set(texts)) > 1 and all(completion["tokens"] <= 12 for completion in answer["completions"])
    assert main([*wanted, "--prompt", "the cat "]) == 0
    shown = capfd.readouterr()
    assert shown.out == f"the cat {texts[0]}\n"
    assert re.search(r"^stopped: (length|end of text|context of 32 full); [\d,]+ tokens/s$", shown.err, re.MULTILINE)


def test_generate_reads_stdin(
    trained: tuple[Path, dict[str, Any], str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))
    code, answer, _ = call(capfd, "generate", str(trained[0]), "--max-tokens", "3")
    sys.stdin.close()
    assert (code, answer["completions"][0]["prompt"]) == (0, "")


def test_generate_refuses_what_is_not_text(
    trained: tuple[Path, dict[str, Any], str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok \xff bad")))
    code, answer, _ = call(capfd, "generate", str(trained[0]))
    assert (code, answer["error"]["problems"][0]["what"]) == (2, "is not UTF-8 at byte 3 (0xff)")


def test_a_short_text_is_evaluated_whole(
    trained: tuple[Path, dict[str, Any], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("the cat sat on the mat and saw the dog\n")
    code, answer, _ = call(capfd, "evaluate", str(trained[0]), "--data", str(tmp_path / "short.txt"))
    assert (code, answer["val_tokens"]) == (0, 39)


def test_export_import_evaluate(
    trained: tuple[Path, dict[str, Any], str], text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model that went out and came back scores the same, and can be trained on."""
    run = str(trained[0])
    exported, back = tmp_path / "exported", tmp_path / "back"
    code, answer, _ = call(capfd, "export", run, "--to", "hf", str(exported))
    assert code == 0 and answer["logits_difference"] <= 1e-4
    assert (exported / "model.safetensors").is_file()
    code, answer, _ = call(capfd, "import", str(exported), "--out", str(back))
    assert code == 0 and answer["params"] == trained[1]["params"]
    data = ("--data", str(text))
    before, after = (call(capfd, "evaluate", folder, *data)[1]["val_loss"] for folder in (run, str(back)))
    assert after == pytest.approx(before, abs=1e-6)
    code, refused, _ = call(capfd, "evaluate", str(back))
    assert code == 2 and refused["error"]["problems"][0]["where"] == "--data"
    tuned = ("train", "--init", str(back), *data, "--steps", "2", "--batch-tokens", "512", "--eval-every", "0")
    code, summary, err = call(capfd, *tuned, "--train.samples", "0", "--out", str(tmp_path / "tuned"))
    assert code == 0, err
    assert f"starting from {back}" in err
    # One epoch's noise away from where it started, not from nothing.
    assert (
        summary["val_loss"] == pytest.approx(trained[1]["val_loss"], rel=0.1) and summary["params"] == answer["params"]
    )


@pytest.mark.parametrize("command", ["generate", "evaluate", "export", "train"])
def test_a_hugging_face_folder_is_answered_with_import(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    args = {"export": [str(tmp_path), "x"], "train": ["--init", str(tmp_path)]}.get(command, [str(tmp_path)])
    code, answer, _ = call(capfd, command, *args)
    assert code == 2
    assert [problem["fix"] for problem in answer["error"]["problems"]] == [
        f"make it one: podling import {tmp_path} --out RUN"
    ]


def test_prepare_then_train_elsewhere(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "prepared")
    code, answer, _ = call(capfd, "prepare", "--data", str(text), "--tokenizer", "bytes", "--out", out)
    assert code == 0 and answer["out"] == out and answer["train_tokens"] > answer["heldout_tokens"] > 0
    assert answer["train_bytes"] + answer["heldout_bytes"] == text.stat().st_size
    assert call(capfd, "prepare", "--data", str(text), "--tokenizer", "bytes", "--out", out)[:2] == (0, answer)


def test_data_problems_come_with_those_of_the_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, answer, _ = call(capfd, "train", "--data", str(tmp_path / "nothing.txt"), "--model.heads", "5")
    assert code == 2
    wheres = [problem["where"] for problem in answer["error"]["problems"]]
    assert "--model.heads" in wheres and any("nothing.txt" in str(p) for p in answer["error"]["problems"])
