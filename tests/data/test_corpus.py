"""Reading: every format gives the same documents, and every kind of damage is told with its place."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podling.config import DataConfig
from podling.data import readers
from podling.data.corpus import find_sources, iter_chunks, iter_documents
from podling.data.readers import ReadCounts
from podling.errors import InputError

DOCUMENTS = [
    "One document.\r\nTwo lines\n",
    "日本語の文書。\n",
    "mid <|endoftext|> dle",
    "\ttabs  \n\n\n",
    "x" * 300_000,
]


def read(path, **settings):
    config = DataConfig(paths=(str(path),), **settings)
    return [(document.text, document.index) for document in iter_documents(find_sources(config), config)]


def compress(suffix, data):
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        import zstandard

        half = len(data) // 2  # two frames, one after another, as pzstd writes them
        return zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_is_read_exactly(tmp_path, suffix):
    text = "".join(DOCUMENTS)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(suffix, text.encode()))
    assert read(path) == [(text, 0)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(tmp_path, suffix):
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(DOCUMENTS)]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(suffix, "\n\n".join(lines).encode()))
    assert read(path, text_field="body") == [(text, i) for i, text in enumerate(DOCUMENTS)]


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(len(DOCUMENTS)), "text": DOCUMENTS}), path, row_group_size=2)
    assert read(path) == [(text, i) for i, text in enumerate(DOCUMENTS)]
    with pytest.raises(InputError, match="no column 'body'\n.*there are: n, text"):
        read(path, text_field="body")
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError, match="not sound parquet"):
        read(path)


def test_hub_dataset_from_a_local_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"text": text}) for text in DOCUMENTS]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(rows))
    assert read(f"hf:{tmp_path}/set") == [(text, i) for i, text in enumerate(DOCUMENTS)]
    with pytest.raises(InputError, match="no field 'body'"):
        read(f"hf:{tmp_path}/set", text_field="body")
    with pytest.raises(InputError, match="cannot be read"):
        read(f"hf:{tmp_path}/none")


def test_end_of_text_lines_split_only_on_request(tmp_path):
    text = "one\n<|endoftext|>\ntwo <|endoftext|>\n <|endoftext|>\n<|endoftext|>\r\n<|endoftext|>\nthree\n<|endoftext|>"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == [(text, 0)]
    wanted = [("one\n", 0), ("two <|endoftext|>\n <|endoftext|>\n", 1), ("three\n", 3)]
    assert read(tmp_path / "a.txt", split_on_eot=True) == wanted
    counts = ReadCounts()
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), split_on_eot=True)
    list(iter_chunks(find_sources(config), config, counts))
    assert (counts.eot_lines, counts.empty_documents) == (0, 1)
    config = DataConfig(paths=(str(tmp_path / "a.txt"),))
    list(iter_chunks(find_sources(config), config, counts))
    assert counts.eot_lines == 6


@given(st.lists(st.sampled_from(["a", "\n", "<|endoftext|>", "<|endof", "\r", " ", "\n<|endoftext|>\n"]), max_size=30))
def test_splitting_does_not_depend_on_how_the_text_arrives(parts):
    text = "".join(parts)
    wanted = _documents(readers._split_on_eot(iter([text])))
    assert _documents(readers._split_on_eot(iter(parts))) == wanted
    assert _documents(readers._split_on_eot(iter(text))) == wanted


def _documents(pairs):
    documents, held = [], ""
    for text, ends in pairs:
        held += text
        if ends:
            documents, held = [*documents, held], ""
    return documents


@given(text=st.text(), cut=st.integers(1, 7))
def test_decoding_does_not_depend_on_how_the_bytes_arrive(text, cut):
    text = text.replace("\0", "")
    source, config = readers.Source("x", "text"), DataConfig()

    class Stream:
        data = text.encode()

        def read(self, size):
            block, self.data = self.data[:cut], self.data[cut:]
            return block

    assert "".join(readers._decoded(source, Stream(), config, ReadCounts())) == text.removeprefix("\ufeff")


def test_invalid_utf8_is_told_with_its_byte(tmp_path):
    path = tmp_path / "a.txt"
    place = readers.READ_BYTES + 1000
    data = "é".encode() * (place // 2) + b"\xff tail"
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.txt: invalid UTF-8 at byte {place} \(0xff\)(.|\n)*--errors replace"):
        read(path)
    counts, config = ReadCounts(), DataConfig(paths=(str(path),), errors="replace")
    text = "".join(chunk.text for chunk in iter_chunks(find_sources(config), config, counts))
    assert text == data.decode(errors="replace")
    assert counts.replaced == {str(path): 1}


def test_a_character_cut_short_at_the_end_is_invalid(tmp_path):
    (tmp_path / "a.txt").write_bytes("ok é".encode()[:-1])
    with pytest.raises(InputError, match="invalid UTF-8 at byte 3"):
        read(tmp_path / "a.txt")


def test_utf16_is_recognised(tmp_path):
    (tmp_path / "a.txt").write_bytes("hello".encode("utf-16").replace(b"\0", b" "))
    with pytest.raises(InputError, match="UTF-16"):
        read(tmp_path / "a.txt")


def test_a_binary_is_refused_with_the_place_of_its_nul(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ELF\x01 and then\x00\x00")
    with pytest.raises(InputError, match=r"a\.txt: NUL byte at byte 13: this is not text(.|\n)*tr -d"):
        read(tmp_path / "a.txt")
    assert read(tmp_path / "a.txt", errors="replace") == [("ELF\x01 and then\ufffd\ufffd", 0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"a\.jsonl:2: is not JSON"),
        (b'{"body": "x", "id": 3}', r"a\.jsonl:2: no field 'text'\n.*there are: body, id"),
        (b'["x"]', r"a\.jsonl:2: is a JSON list"),
        (b'{"text": 7}', r"a\.jsonl:2: field 'text' is int"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: invalid UTF-8 at byte 25"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:2: field 'text' holds 1 NUL or lone surrogate"),
        (b'{"text": "\\u0000"}', r"a\.jsonl:2: field 'text' holds 1 NUL or lone surrogate"),
    ],
)
def test_a_bad_jsonl_line_is_told_with_its_number(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.jsonl")


def test_an_endless_jsonl_line_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n[' + '{"text": "x"},' * 100)
    with pytest.raises(InputError, match=r"a\.jsonl:2: is a line of over 1,000 bytes"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_archive_is_no_end_of_text(tmp_path, suffix):
    data = compress(suffix, "".join(f"line {i}\n" for i in range(50_000)).encode())
    path = tmp_path / f"a.txt{suffix}"
    for broken in (data[:-20], data[:20] + b"garbage!" + data[28:], b"plain text"):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=f"a.txt{suffix}: is damaged"):
            read(path)


def test_the_limit_cuts_at_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 10)
    (tmp_path / "b.txt").write_text("never reached")
    assert read(tmp_path, limit="7") == [("ééé", 0)]


def test_empty_documents_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n{"text": ""}\n')
    counts, config = ReadCounts(), DataConfig(paths=(str(tmp_path),))
    assert [chunk.text for chunk in iter_chunks(find_sources(config), config, counts)] == ["x"]
    assert counts.empty_documents == 2


def test_replacements_are_counted_by_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\xff"}\n{"text": "\xfe\xfe"}\n{"text": "\\ud800"}\n')
    counts, config = ReadCounts(), DataConfig(paths=(str(path),), errors="replace")
    texts = [chunk.text for chunk in iter_chunks(find_sources(config), config, counts)]
    assert texts == ["a\ufffd", "\ufffd\ufffd", "\ufffd"]
    assert counts.replaced == {str(path): 4}
