"""Documents found again in token shards: whole, each once, by the names that messages use."""

import json
from pathlib import Path

import numpy as np
import pytest

from podling.config import DataConfig
from podling.data import encode
from podling.data.documents import document_tokens, list_documents
from podling.data.prepare import prepare
from podling.data.shards import Prepared

BOTH = ("train", "heldout")


def texts_of(prepared: Prepared, splits: tuple) -> list[tuple[str, str]]:
    """Name and text of each document, as its tokens have it; the last token ends it."""
    found = []
    for document in list_documents(prepared, splits):
        tokens = document_tokens(prepared, document)
        assert tokens.dtype == np.int32 and len(tokens) <= document.tokens
        assert (tokens == prepared.tokenizer.eot_id).sum() == 1 and tokens[-1] == prepared.tokenizer.eot_id
        name = prepared.document_name(document.source, document.index)
        found.append((name, prepared.tokenizer.decode(tokens.tolist())))
    return found


@pytest.fixture
def rows() -> list[str]:
    return [f"document {number} " + "word " * (number % 7) for number in range(60)]


def prepared_from(path: Path, tmp_path: Path) -> Prepared:
    config = DataConfig(paths=(str(path),), tokenizer="bytes", holdout=0.3)
    return Prepared.open(prepare(config, tmp_path / "out"))


@pytest.mark.parametrize("segment_bytes", [64_000_000, 100], ids=["one shard", "many shards"])
def test_whole_documents(rows: list[str], segment_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty line of the file is no document, and keeps its number."""
    monkeypatch.setattr(encode, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(encode, "BATCH_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *rows]))
    prepared = prepared_from(path, tmp_path)
    everything = texts_of(prepared, BOTH)
    assert everything == [(f"{path} (document {number})", text) for number, text in enumerate(rows, start=1)]
    held = texts_of(prepared, ("heldout",))
    assert 5 < len(held) < 40 and set(held) < set(everything)
    assert not set(held) & set(texts_of(prepared, ("train",)))
    place = len(prepared.tokens("heldout")) - 1
    assert held[-1][0] == prepared.document_at("heldout", place)


def test_a_document_that_is_divided_is_put_together_again(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = "".join(f"line {number} of the book\n" for number in range(50))
    path.write_text(text)
    prepared = prepared_from(path, tmp_path)
    assert texts_of(prepared, BOTH) == [(str(path), text)]
    (tail,) = texts_of(prepared, ("heldout",))
    assert text.endswith(tail[1]) and len(text) / 5 < len(tail[1]) < len(text) / 2


def test_a_long_document_goes_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(encode, "BATCH_BYTES", 1000)
    monkeypatch.setattr("podling.data.cutting.PIECE_CHARS", 500)
    path = tmp_path / "book.txt"
    text = "".join(f"line {number} of the book\n" for number in range(400))
    path.write_text(text)
    prepared = prepared_from(path, tmp_path)
    assert len(prepared.manifest["splits"]["train"]["shards"]) > 1
    assert texts_of(prepared, BOTH) == [(str(path), text)]
