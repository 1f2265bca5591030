"""`podling evaluate --per-example`: each document by itself, the most surprising first."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podling.cli.documents import document_table
from podling.cli.main import main
from podling.data.tokenizer import Tokenizer

TEXTS = [f"the {what} sees the {other}. " * 3 for what in ("cat", "dog", "bird") for other in ("ball", "mouse", "car")]
ODD = "X9#Q~Z^7|K&"


def call(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    """Run `evaluate` in this process with `--json`: its exit code, its object, its stderr."""
    code = main(["evaluate", *args, "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rows.jsonl, odd.jsonl, and a run trained on the first in a process of its own."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, texts in (("rows", TEXTS * 9), ("odd", [*TEXTS, ODD])):
        rows = [{"text": f"{text}{'' if text == ODD else number}"} for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = "--model gpt2-nano --model.layers 1 --model.embed 32 --model.heads 2 --context 32 --vocab-size 272"
    rest = "--data rows.jsonl --data.holdout 0.2 --batch-tokens 512 --steps 30 --train.samples 0 --eval-every 0"
    command = [sys.executable, "-m", "podling", "train", *small.split(), *rest.split(), "--out", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_the_odd_one_comes_first(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, answer, _ = call(capfd, "run", "--per-example", "--data", "odd.jsonl", "--out", "all.jsonl")
    assert code == 0
    documents = answer["documents"]
    assert len(documents) == len(TEXTS) + 1
    assert documents[0]["text"] == ODD and documents[0]["number"] == len(TEXTS)
    assert documents[0]["path"] == "odd.jsonl" and documents[0]["tokens"] == len(ODD) + 1
    surprise = [document["bits_per_byte"] * document["bytes"] / (document["bytes"] + 1) for document in documents]
    assert surprise == sorted(surprise, reverse=True)
    assert all(document["grad_norm"] > 0 for document in documents)
    assert [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()] == documents
    # The same tokens as the figures without --per-example, but each document begins anew.
    figures = call(capfd, "run", "--data", "odd.jsonl")[1]
    assert answer["tokens"] == sum(document["tokens"] for document in documents) == figures["val_tokens"] + 1
    total = sum(document["nats_per_token"] * document["tokens"] for document in documents)
    assert answer["nats_per_token"] == pytest.approx(total / answer["tokens"])
    assert answer["nats_per_token"] == pytest.approx(figures["val_loss"], rel=0.1)
    assert answer["bits_per_byte"] == pytest.approx(figures["val_bits_per_byte"], rel=0.1)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_document_is_scored_the_same_in_every_company(
    rows: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """None is divided, however few or large they are: what each comes to is its own."""
    tokenizer = Tokenizer.load(folder / "run" / "tokenizer.json")
    texts = [f"the dog number {number} sees the cat and the ball. " * (1 + number % 3) for number in range(200)]
    for name, chosen in (("many", texts), ("few", texts[:rows])):
        lines = [json.dumps({"text": text}) + "\n" for text in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    few, many = (
        {
            document["number"]: document
            for document in call(capfd, "run", "--per-example", "--data", name)[1]["documents"]
        }
        for name in ("few.jsonl", "many.jsonl")
    )
    assert few.keys() == set(range(rows)) and many.keys() == set(range(200))
    for number, document in few.items():
        assert document["tokens"] == len(tokenizer.encode(texts[number])) + 1
        assert document["bytes"] == len(texts[number])
        assert document | {"path": "", "document": ""} == many[number] | {"path": "", "document": ""}
    code, figures, err = call(capfd, "run", "--data", "few.jsonl")
    assert code == 0 and "scoring all of it" in err
    # One stream, of which only the first token is not scored.
    assert figures["val_tokens"] == sum(document["tokens"] for document in few.values()) - 1


def test_data_that_was_prepared_before_keeps_its_split(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "book.txt").write_text("".join(f"line {number} of the cat\n" for number in range(60)))
    tokenizer = ["--tokenizer", "run/tokenizer.json", "--data.holdout", "0.3"]
    assert main(["prepare", "--data", "book.txt", *tokenizer, "--out", "book"]) == 0
    assert "the end of the only document" in "".join(capfd.readouterr())
    whole, divided = (call(capfd, "run", "--data", name)[1]["val_tokens"] for name in ("book.txt", "book"))
    assert divided == whole  # one more end-of-text, and one more first token that is not scored
    (alone,), (joined,) = (
        call(capfd, "run", "--data", name, "--per-example")[1]["documents"] for name in ("book.txt", "book")
    )
    assert alone["tokens"] == joined["tokens"] == whole + 1 and alone["bytes"] == joined["bytes"]


@pytest.mark.parametrize("text", ["c", "é", "\n"])
def test_a_text_of_one_character(text: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "short.txt").write_text(text)
    code, figures, err = call(capfd, "run", "--data", "short.txt")
    assert (code, figures.get("val_tokens")) == (0, len(text.encode())), err
    code, answer, err = call(capfd, "run", "--data", "short.txt", "--per-example")
    assert (code, answer.get("tokens")) == (0, len(text.encode()) + 1), err
    assert main(["evaluate", "run", "--data", "short.txt", "--per-example"]) == 0
    shown = "".join(capfd.readouterr())
    assert "\n1 document, " in shown and "1 documents" not in shown
    assert main(["evaluate", "run", "--data", "short.txt"]) == 0
    shown = capfd.readouterr().out
    assert "nan" not in shown and ("no bits per byte" in shown) == (len(text.encode()) == 1)


def test_a_text_that_comes_to_no_token(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may drop what it does not know; then there is only the end of the text."""
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts: [np.zeros(0, np.int64) for _ in texts])
    (folder / "dropped.txt").write_text("dropped")
    code, answer, _ = call(capfd, "run", "--data", "dropped.txt")
    (problem,) = answer["error"]["problems"]
    assert (code, problem["where"]) == (2, "dropped.txt")
    assert problem["what"].startswith("comes to a single token") and "holdout" not in problem["fix"]


def test_one_character_does_not_come_first(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its end-of-text costs much for one byte: by bare bits per byte it would come before all that is odd."""
    records = [{"text": text} for text in ("t", "the cat sees the ball. " * 9, ODD * 9)]
    (folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    documents = call(capfd, "run", "--per-example", "--data", "short.jsonl", "--out", "short.csv")[1]["documents"]
    assert [document["number"] for document in documents] == [2, 0, 1]
    assert documents[1]["bits_per_byte"] > documents[0]["bits_per_byte"]
    assert [document["text"][-1] for document in documents] == ["…", "t", "…"]
    with open(folder / "short.csv", newline="") as file:
        assert [row["text"][-1] for row in csv.DictReader(file)] == ["…", "t", "…"]
    main(["evaluate", "--help"])
    assert "Very short texts come early by nature" in " ".join(capfd.readouterr().out.replace("│", "").split())


def test_its_own_held_out_documents_as_a_table(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--per-example", "--top", "3", "--out", "own.csv"]) == 0
    out = capfd.readouterr().out
    with open(folder / "own.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = out.splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("document ")]
    assert lines[head].split() == ["document", "tokens", "nats/token", "bits/byte", "gradient", "begins"]
    for row, line in zip(rows[:3], lines[head + 2 :], strict=False):
        assert line.startswith(row["document"]) and f"{float(row['bits_per_byte']):.3f}" in line
        begins = line.split("  ")[-1].removesuffix("…")
        assert len(begins) > 20 and row["text"].startswith(begins)
    assert lines[head + 5] == f"... and {len(rows) - 3} more (--top N; all of them with --out FILE)"
    assert lines[head + 6].startswith(f"{len(rows)} documents, ")
    assert f"held out: {len(rows)} whole documents" in out


def test_every_problem_is_named_before_anything_is_read(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "there.csv").write_text("mine")
    code, answer, _ = call(capfd, "run", "--top", "0", "--out", "there.csv", "--data", "nothing.txt")
    assert code == 2
    problems = {(problem["where"], problem["what"]) for problem in answer["error"]["problems"]}
    assert {("--top", "0 is less than 1"), ("--out", "there.csv is there already")} <= problems
    assert {("--top", "is about single documents"), ("--out", "is about single documents")} <= problems
    assert any("nothing.txt" in what + where for where, what in problems)
    assert (folder / "there.csv").read_text() == "mine"


def test_how_data_is_read_without_data(capfd: pytest.CaptureFixture[str]) -> None:
    code, answer, _ = call(capfd, "run", "--limit", "1MB", "--no-split-on-eot", "--top", "5")
    problems = {(problem["where"], problem["what"]) for problem in answer["error"]["problems"]}
    says = "says how --data is read"
    assert (code, problems) == (
        2,
        {("--limit", says), ("--no-split-on-eot", says), ("--top", "is about single documents")},
    )


@pytest.mark.parametrize(
    ("out", "what"),
    [
        ("all.txt", "all.txt is neither .jsonl nor .csv"),
        ("rows.jsonl/all.csv", "rows.jsonl/all.csv lies below the file"),
        ("folder.csv", "folder.csv is a folder"),
    ],
)
def test_a_file_that_cannot_be_written(out: str, what: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "folder.csv").mkdir(exist_ok=True)
    code, answer, _ = call(capfd, "run", "--per-example", "--out", out)
    assert code == 2
    (problem,) = answer["error"]["problems"]
    assert problem["where"] == "--out" and problem["what"].startswith(what)


def test_a_table_of_hostile_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing steers the terminal, wide characters take two columns, long names keep their end."""
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((100, 24)))
    record = {"tokens": 5, "nats_per_token": float("nan"), "bits_per_byte": float("nan"), "grad_norm": 1e9}
    texts = ["\x1b[2Jgone", "", "日本語" * 40]
    names = ["a", "deep/" * 20 + "end.txt", "日本.txt"]
    shown = [record | {"document": name, "text": text} for name, text in zip(names, texts, strict=True)]
    head, rule, first, second, third = document_table(shown, 5).splitlines()
    assert "\x1b" not in first and first.endswith("gone")
    assert second.startswith("…") and "end.txt " in second and second.endswith("(white space)")
    assert third.endswith("…") and len(rule) == 100
    from rich.cells import cell_len

    assert all(cell_len(line) <= 100 for line in (first, second, third))
    assert len({cell_len(line[: line.index("nan")]) for line in (first, second, third)}) == 1
