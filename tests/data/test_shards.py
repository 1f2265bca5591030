"""Shards on disk: what is written is what is read, and damage is found when they are opened."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podling.data.shards import Prepared, ShardWriter, TokenArray, token_dtype
from podling.errors import InputError


@pytest.fixture
def copy(prepared_folder, tmp_path):
    return shutil.copytree(prepared_folder, tmp_path / "copy")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_a_shard_holds_its_tokens_and_documents(tmp_path, vocab_size, dtype):
    writer = ShardWriter(tmp_path, "train-00000", vocab_size, 0)
    top = vocab_size - 1
    ids = [np.array(part, np.uint32) for part in ([1, 2], [3], [], [top, 4])]
    writer.add([(ids[0], 7, 0, True, 9), (ids[1], 7, 1, False, 4)])
    writer.add([(ids[2], 7, 1, True, 0), (ids[3], 8, 0, True, 5)])
    shard = writer.finish()
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert np.fromfile(tmp_path / shard["file"], dtype).tolist() == [1, 2, 0, 3, 0, top, 4, 0]
    assert (shard["tokens"], shard["text_bytes"], shard["ended"]) == (8, 18, 3)
    table = np.load(tmp_path / "train-00000.docs.npy")
    assert [tuple(map(int, row)) for row in table] == [(0, 7, 0), (3, 7, 1), (5, 8, 0)]


def test_an_id_outside_the_vocabulary_is_never_written(tmp_path):
    """JAX clamps an index that is too large, and uint16 wraps: both would train on other text without a word."""
    writer = ShardWriter(tmp_path, "x", 300, 0)
    for bad in (300, 70_000, -1):
        with pytest.raises(InputError, match=f"token id {bad} is out of range: the vocabulary has 300"):
            writer.add([(np.array([1, bad], np.int64), 0, 0, True, 2)])
    assert writer.finish() is None


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=5), st.integers(-30, 30), st.integers(-30, 30))
def test_a_token_array_slices_like_a_list(parts, start, stop):
    whole = [token for part in parts for token in part]
    array = TokenArray([np.array(part, np.uint16) for part in parts])
    assert len(array) == len(whole)
    piece = array[start:stop]
    assert piece.tolist() == whole[start:stop] and piece.dtype == np.int32
    if -len(whole) <= start < len(whole):
        assert array[start] == whole[start]
    else:
        with pytest.raises(IndexError):
            array[start]


def test_a_damaged_shard_is_named(copy):
    shard = copy / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    shard.write_bytes(data[:-2])
    with pytest.raises(
        InputError, match=r"train-00000\.bin: has [\d,]+ bytes where the manifest says [\d,]+\n.*delete"
    ):
        Prepared.open(copy)
    data[100] ^= 1
    shard.write_bytes(data)
    assert Prepared.open(copy)
    with pytest.raises(InputError, match=r"train-00000\.bin: is corrupt"):
        Prepared.open(copy, verify=True)
    shard.unlink()
    (copy / "heldout-00000.bin").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        Prepared.open(copy)
    assert len(caught.value.problems) == 2


def test_a_changed_tokenizer_is_noticed(copy):
    spec = json.loads((copy / "tokenizer.json").read_text())
    spec["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(InputError, match="is not the tokenizer that made these tokens"):
        Prepared.open(copy)


def test_what_is_no_prepared_data_is_refused(copy, tmp_path):
    with pytest.raises(InputError, match="is not prepared data"):
        Prepared.open(tmp_path)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format": "podling-tokens-99"}))
    with pytest.raises(InputError, match="podling-tokens-99"):
        Prepared.open(copy)


def test_verify_passes_on_sound_data(prepared_folder):
    prepared = Prepared.open(prepared_folder, verify=True)
    lengths = prepared.tokenizer.token_bytes()
    for split in ("train", "heldout"):
        tokens = prepared.tokens(split)
        assert tokens[len(tokens) - 1] == prepared.tokenizer.eot_id
        assert sum(lengths[token] for token in tokens[:]) == prepared.bytes(split)


def test_documents_are_found_by_token(prepared_folder, corpus):
    """Every document's first and last token lead back to it."""
    prepared = Prepared.open(prepared_folder)
    rows = [json.loads(line)["text"] for line in (corpus / "rows.jsonl").read_text().splitlines()]
    seen = set()
    for split in ("train", "heldout"):
        tokens = prepared.tokens(split)[:]
        start = 0
        for end in np.flatnonzero(tokens == prepared.tokenizer.eot_id):
            name = prepared.document_at(split, start)
            assert name == prepared.document_at(split, int(end))
            text = prepared.tokenizer.decode(tokens[start:end])
            if name.startswith(f"{corpus}/rows.jsonl"):
                assert text == rows[int(name.rpartition("document ")[2].rstrip(")"))]
            else:
                assert text == Path(name).read_text()
            seen.add(name)
            start = int(end) + 1
    assert len(seen) == 300
    with pytest.raises(IndexError):
        prepared.document_at("train", len(prepared.tokens("train")))


def test_the_summary_states_size_and_split(prepared_folder):
    prepared = Prepared.open(prepared_folder)
    first, second = prepared.summary().splitlines()
    tokens = len(prepared.tokens("train")) + len(prepared.tokens("heldout"))
    text_bytes = prepared.bytes("train") + prepared.bytes("heldout")
    assert first.startswith("300 documents, ")
    assert f"{tokens:,} tokens of bpe 320 ({text_bytes / tokens:.2f} bytes per token)" in first
    documents = int((prepared.tokens("heldout")[:] == prepared.tokenizer.eot_id).sum())
    assert second.startswith(f"held out: {documents} whole documents, chosen by the hash of their text; ")
    assert f"({prepared.bytes('heldout') / text_bytes:.1%})" in second
