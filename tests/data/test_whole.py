"""Text that is only scored: prepared whole, in reading order, with nothing held out."""

import json
from pathlib import Path

import pytest

from podling.config import DataConfig
from podling.data.documents import document_tokens, list_documents
from podling.data.prepare import prepare
from podling.data.shards import Prepared
from podling.errors import InputError


def rows_file(folder: Path, texts: list[str]) -> DataConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(paths=(str(folder / "rows.jsonl"),), tokenizer="bytes")


@pytest.mark.parametrize(
    "texts",
    [
        ["a"],
        ["some words\n" * 9000],
        ["one two\n" * 50, "é 日本 " * 40],
        [f"row {number}\n" * 9 for number in range(300)],
    ],
    ids=["one character", "one large", "two", "many"],
)
def test_every_document_is_whole(texts: list[str], tmp_path: Path) -> None:
    prepared = Prepared.open(prepare(rows_file(tmp_path, texts), whole=True), verify=True)
    tokens = prepared.tokens("train")
    stream = b"".join(text.encode() + b"\0" for text in texts)  # no text has a 0: it stands for end-of-text
    eot = prepared.tokenizer.eot_id
    assert bytes(0 if token == eot else token for token in tokens[:].tolist()) == stream
    assert (prepared.bytes("heldout"), len(prepared.tokens("heldout"))) == (0, 0)
    assert prepared.manifest["split_rule"] == "none" and "held out: nothing" in prepared.summary()
    documents = [document_tokens(prepared, place) for place in list_documents(prepared, ("train", "heldout"))]
    assert [prepared.tokenizer.decode(tokens.tolist()) for tokens in documents] == texts


def test_it_is_never_taken_for_data_to_train_on(tmp_path: Path) -> None:
    config = rows_file(tmp_path, ["some words to learn from\n" * 9] * 3)
    whole = prepare(config, whole=True)
    assert prepare(config, whole=True) == whole != prepare(config)
    fields = {"paths": config.paths, "tokenizer": config.tokenizer}
    with pytest.raises(InputError, match="0 leaves nothing to evaluate on"):
        prepare(DataConfig(**fields, holdout=0.0))
    assert prepare(DataConfig(**fields, holdout=0.3), whole=True) == whole, "the share has no say"
    with pytest.raises(InputError, match="holds nothing out"):
        prepare(DataConfig(paths=(str(whole),)))
    assert prepare(DataConfig(paths=(str(whole),)), whole=True) == whole


def test_text_is_still_too_short_to_hold_any_out(tmp_path: Path) -> None:
    config = rows_file(tmp_path, ["a"])
    with pytest.raises(InputError, match="nothing would be left to evaluate on"):
        prepare(config)
    prepare(config, whole=True)
