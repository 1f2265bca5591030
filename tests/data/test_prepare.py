"""Preparing: nothing lost, the split as stated, reuse and resume, and flat memory."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podling.config import DataConfig
from podling.data import encode
from podling.data import prepare as module
from podling.data.cutting import Cutter
from podling.data.prepare import PrepareEvent, prepare
from podling.data.readers import Chunk
from podling.data.scan import Scan, choose_split
from podling.data.shards import Prepared
from podling.errors import InputError, RunError


def documents(prepared, split):
    """The texts between end-of-text tokens."""
    tokens, eot = prepared.tokens(split)[:].tolist(), prepared.tokenizer.eot_id
    texts, held = [], []
    for token in tokens:
        if token == eot:
            texts.append(prepared.tokenizer.decode(held))
            held = []
        else:
            held.append(token)
    assert not held, "the last document does not end"
    return texts


def shard_hashes(folder):
    splits = Prepared.open(folder, verify=True).manifest["splits"]
    return [shard["sha256"] for split in splits.values() for shard in split["shards"]]


def test_every_document_is_in_one_split_and_whole(prepared_folder, corpus):
    prepared = Prepared.open(prepared_folder)
    texts = [json.loads(line)["text"] for line in (corpus / "rows.jsonl").read_text().splitlines()]
    texts += [(corpus / name).read_text() for name in ("a.txt", "b.txt")]
    train, heldout = documents(prepared, "train"), documents(prepared, "heldout")
    assert sorted(train + heldout) == sorted(texts)
    assert not set(train) & set(heldout), "equal documents must stay together"
    assert prepared.manifest["split_rule"] == "hash"
    assert 0.05 < prepared.bytes("heldout") / sum(len(text.encode()) for text in texts) < 0.2


def test_the_split_does_not_depend_on_order_or_names(tmp_path, text_of):
    texts = [text_of(200, seed) for seed in range(60)]
    held = []
    for number, order in enumerate((texts, texts[::-1])):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in order))
        folder = prepare(DataConfig(paths=(str(path),), tokenizer="bytes", holdout=0.2))
        held.append(sorted(documents(Prepared.open(folder), "heldout")))
    assert held[0] == held[1]


def test_one_document_holds_out_its_tail_from_a_line_on(text_file):
    prepared = Prepared.open(prepare(DataConfig(paths=(str(text_file),), vocab_size=300)))
    (train,), (heldout,) = documents(prepared, "train"), documents(prepared, "heldout")
    text = text_file.read_text()
    assert train + heldout == text and train.endswith("\n")
    assert "\n" not in text.encode()[round(len(text.encode()) * 0.95) : len(train.encode()) - 1].decode(errors="ignore")
    assert prepared.manifest["split_rule"] == "tail"
    assert "the end of the only document" in prepared.summary()
    assert prepared.document_at("heldout", 0) == str(text_file)


def test_ids_are_those_of_the_whole_text_at_once(tmp_path, text_of):
    """The text is tokenized in pieces; the library, given each half of the split whole, must agree to the id."""
    (tmp_path / "a.txt").write_text(text_of(400_000, 5))
    prepared = Prepared.open(prepare(DataConfig(paths=(str(tmp_path),), vocab_size=340)))
    for split in ("train", "heldout"):
        (text,) = documents(prepared, split)
        whole = prepared.tokenizer._backend.encode(text, add_special_tokens=False).ids
        assert prepared.tokens(split)[:-1].tolist() == whole


def test_few_documents_each_hold_out_their_tail(tmp_path, text_of):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(text_of(20_000, ord(name)))
    prepared = Prepared.open(prepare(DataConfig(paths=(str(tmp_path),), tokenizer="bytes", holdout=0.1)))
    train, heldout = documents(prepared, "train"), documents(prepared, "heldout")
    assert [a + b for a, b in zip(train, heldout, strict=True)] == [text_of(20_000, ord(name)) for name in "abc"]
    assert prepared.manifest["split_rule"] == "tails"


@given(
    texts=st.lists(st.text("ab \n日", min_size=1, max_size=40), min_size=1, max_size=5),
    holdout=st.floats(0.01, 0.99),
    piece=st.integers(1, 12),
)
def test_any_split_keeps_all_text_in_order(texts, holdout, piece):
    sizes = [len(text.encode()) for text in texts]
    found = Scan(source_bytes=[sum(sizes)])
    found.sizes_bytes.extend(sizes)
    found.hashes.extend(hash(text) % 2**64 for text in texts)
    split = choose_split(found, holdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("podling.data.cutting.PIECE_CHARS", piece)
        chunks = (Chunk(text, 0, i, True, "x") for i, text in enumerate(texts))
        patch.setattr(encode, "iter_chunks", lambda *_: chunks)
        parts = list(encode._split_parts(Cutter("any"), None, DataConfig(), split))
    for number, text in enumerate(texts):
        mine = [part for part in parts if part.index == number]
        assert "".join(part.text for part in mine) == text
        assert [part.split for part in mine] == sorted(part.split for part in mine)
        for side in (0, 1):
            ends = [part.ends for part in mine if part.split == side]
            assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
    assert all(part.text_bytes == len(part.text.encode()) for part in parts)


def test_nothing_is_prepared_twice_and_every_change_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some words here\n" * 100)
    config = DataConfig(paths=(str(path),), vocab_size=258)
    first = prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr(module, "scan", None)
        assert prepare(config) == first
    before = path.stat()
    path.write_text("some words hers\n" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the same size and time: only the content tells
    changed = prepare(config)
    assert changed != first
    others = [
        DataConfig(paths=(str(path),), vocab_size=259),
        DataConfig(paths=(str(path),), tokenizer="bytes"),
        DataConfig(paths=(str(path),), vocab_size=258, holdout=0.1),
        DataConfig(paths=(str(path),), vocab_size=258, limit="1kB"),
    ]
    assert len({prepare(other) for other in others} | {first, changed}) == 6


def test_an_output_folder_is_reused_or_refused_but_never_overwritten(tmp_path, text_file):
    config = DataConfig(paths=(str(text_file),), tokenizer="bytes")
    out = prepare(config, tmp_path / "out")
    assert out == tmp_path / "out" and sorted(os.listdir(tmp_path)) == ["out", "text.txt"]
    assert prepare(config, out) == out
    with pytest.raises(InputError, match="prepared from other text or with other settings"):
        prepare(DataConfig(paths=(str(text_file),), tokenizer="char"), out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="exists and is not prepared data"):
        prepare(config, tmp_path / "mine")
    with pytest.raises(InputError, match="is a file"):
        prepare(config, text_file / "below" / "out")
    assert sorted(os.listdir(tmp_path)) == ["mine", "out", "text.txt"]


def test_a_prepared_folder_is_taken_as_data(prepared_folder, tmp_path):
    assert prepare(DataConfig(paths=(str(prepared_folder),))) == prepared_folder
    with pytest.raises(InputError) as caught:
        prepare(DataConfig(paths=(str(prepared_folder),), tokenizer="char", holdout=0.3))
    assert "was prepared with tokenizer 'bpe', not 'char'" in str(caught.value)
    assert "was prepared with holdout 0.1, not 0.3" in str(caught.value)
    with pytest.raises(InputError, match="is prepared already"):
        prepare(DataConfig(paths=(str(prepared_folder),)), tmp_path / "again")


@pytest.mark.parametrize("content", ["x", "\n", "é"])
def test_text_too_short_to_hold_any_out(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(InputError, match="too short: nothing would be left to evaluate on\n.*holdout"):
        prepare(DataConfig(paths=(str(tmp_path),), tokenizer="bytes"))


@pytest.mark.parametrize(("holdout", "what"), [(0.0, "evaluate"), (1.0, "train"), (-0.5, "evaluate")])
def test_a_share_that_leaves_nothing(text_file, holdout, what):
    with pytest.raises(InputError, match=f"leaves nothing to {what} on"):
        prepare(DataConfig(paths=(str(text_file),), holdout=holdout))


def test_problems_of_several_files_come_together(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok\xff")
    (tmp_path / "b.txt").write_text("fine")
    (tmp_path / "c.jsonl").write_text("{}\n")
    (tmp_path / "d.txt").write_bytes(b"\0")
    with pytest.raises(InputError) as caught:
        prepare(DataConfig(paths=(str(tmp_path),)), tmp_path.parent / "out")
    assert not list(tmp_path.parent.glob(".out*")), "a refused prepare leaves nothing behind"
    assert [problem.where.removeprefix(f"{tmp_path}/") for problem in caught.value.problems] == [
        "a.txt",
        "c.jsonl:1",
        "d.txt",
    ]


def test_only_empty_rows_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(InputError, match="holds no text"):
        prepare(DataConfig(paths=(str(tmp_path),)))


def test_what_was_left_out_is_said(tmp_path, text_of):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": text_of(300, i)}) for i in range(40)) + '\n{"text": ""}'
    )
    (tmp_path / "b.txt").write_bytes(b"<|endoftext|>\nbad \xff byte")
    (tmp_path / "c.png").write_bytes(b"x")
    config = DataConfig(paths=(str(tmp_path),), tokenizer="char", errors="replace", limit="1GB")
    summary = Prepared.open(prepare(config)).summary()
    assert "skipped: 1 .png" in summary
    assert "left out: 1 empty document\n" in summary
    assert f"replaced with U+FFFD: 1 in {tmp_path}/b.txt" in summary
    assert "holds <|endoftext|> 1 time, kept as plain text; --split-on-eot" in summary
    assert "limit" not in summary
    summary = Prepared.open(prepare(DataConfig(paths=(str(tmp_path),), tokenizer="bytes", limit="5kB"))).summary()
    assert "reading stopped at --limit 5kB" in summary and "5.0 kB of text" in summary


def test_text_that_a_tokenizer_drops_or_does_not_know_is_counted(tmp_path):
    """A byte-level vocabulary trained without the whole alphabet drops bytes without a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (tmp_path / "a.txt").write_text("abc abd zz\n" * 50)
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abcdĠĊ")}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "partial.json"))
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / "partial.json"))
    assert "100 bytes of the text were dropped or changed by partial.json" in Prepared.open(prepare(config)).summary()

    backend = Tokenizer(models.WordLevel({"abc": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "words.json"))
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / "words.json"))
    assert "100 tokens are unknown: words.json cannot write all" in Prepared.open(prepare(config)).summary()


def test_a_file_size_limit_stops_it_and_the_next_attempt_goes_on(tmp_path, text_file):
    config = DataConfig(paths=(str(text_file),), tokenizer="bytes")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RunError, match="file-size limit"):
            prepare(config, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "out").exists()
    assert shard_hashes(prepare(config, tmp_path / "out")) == shard_hashes(prepare(config))


def test_python_is_recognised(tmp_path):
    (tmp_path / "a.py").write_text("import os\n" * 400)
    (tmp_path / "b.txt").write_text("x\n")
    assert Prepared.open(prepare(DataConfig(paths=(str(tmp_path),), tokenizer="bytes"))).kind == "python"
    (tmp_path / "b.txt").write_text("x\n" * 4000)
    assert Prepared.open(prepare(DataConfig(paths=(str(tmp_path),), tokenizer="bytes"))).kind == "text"


def test_japanese_documents_split_on_end_of_text_lines(tmp_path):
    texts = [f"{i}。吾輩は猫である。\n名前はまだ無い。" * 5 + "\n" for i in range(50)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(texts))
    config = DataConfig(paths=(str(tmp_path),), vocab_size=280, split_on_eot=True, holdout=0.2)
    prepared = Prepared.open(prepare(config))
    assert sorted(documents(prepared, "train") + documents(prepared, "heldout")) == sorted(texts)


def test_progress_reaches_the_end_of_every_stage(text_file):
    events: list[PrepareEvent] = []
    prepare(DataConfig(paths=(str(text_file),), vocab_size=300), progress=events.append)
    last = {event.stage: event for event in events}
    assert list(last) == ["checking files", "reading", "training the tokenizer", "tokenizing"]
    size = text_file.stat().st_size
    for event in last.values():
        assert event.done_bytes == size
        assert event.mb_per_s > 0
    end = last["tokenizing"]
    assert (end.total_bytes, end.left_s) == (size, 0)
    prepared = Prepared.open(prepare(DataConfig(paths=(str(text_file),), vocab_size=300)))
    assert end.tokens + 2 == len(prepared.tokens("train")) + len(prepared.tokens("heldout"))


SMALL = "from podling.data import encode; encode.BATCH_BYTES = 5_000; encode.SEGMENT_BYTES = 20_000\n"
RUN = """
import sys, time
from pathlib import Path
from podling.config import DataConfig
from podling.data.prepare import prepare
from podling.data.tokenizer import Tokenizer
plain = Tokenizer.encode_batch
def slow(self, texts):
    time.sleep(0.02)
    return plain(self, texts)
Tokenizer.encode_batch = slow
prepare(DataConfig(paths=(sys.argv[1],), vocab_size=300), Path(sys.argv[2]))
"""


def test_a_killed_prepare_goes_on_from_its_finished_shards(tmp_path, text_of, monkeypatch):
    """kill -9 leaves no half-made folder, and the next attempt makes the same data without redoing what was done."""
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text_of(2_000, i)}) for i in range(120)))
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    process = subprocess.Popen([sys.executable, "-c", SMALL + RUN, str(tmp_path / "text.jsonl"), str(out)])
    deadline = time.monotonic() + 60
    while not (partial / "segment-00002.json").exists() and time.monotonic() < deadline:
        assert process.poll() is None, "it finished before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("*-0000[0-2].bin")}
    assert len(finished) >= 3

    monkeypatch.setattr(encode, "BATCH_BYTES", 5_000)
    monkeypatch.setattr(encode, "SEGMENT_BYTES", 20_000)
    config = DataConfig(paths=(str(tmp_path / "text.jsonl"),), vocab_size=300)
    with monkeypatch.context() as patch:
        patch.setattr(module, "build_tokenizer", None)  # the tokenizer is there already
        prepare(config, out)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    assert not partial.exists()
    straight = prepare(config, tmp_path / "straight")
    assert shard_hashes(out) == shard_hashes(straight)
    assert Prepared.open(out).fingerprint == Prepared.open(straight).fingerprint
    assert sorted(os.listdir(out)) == sorted(os.listdir(straight))


def test_leftovers_of_other_data_are_not_continued(tmp_path, text_file):
    config = DataConfig(paths=(str(text_file),), tokenizer="bytes")
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "key").write_text("another")
    (partial / "segment-00000.json").write_text(
        '{"batches": 1, "unknown": 0, "changed_bytes": 0, "shards": {"train": null, "heldout": null}}'
    )
    out = prepare(config, tmp_path / "out")
    assert shard_hashes(out) == shard_hashes(prepare(config))


def test_a_wrong_tokenizer_is_found_before_any_text_is_read(tmp_path, text_file, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(module, "scan", None)
    with pytest.raises(InputError, match="is not a Hugging Face tokenizer.json"):
        prepare(DataConfig(paths=(str(text_file),), tokenizer=str(tmp_path / "tokenizer.json")))


def test_two_processes_prepare_the_same_data_once(tmp_path, text_file):
    config = DataConfig(paths=(str(text_file),), tokenizer="bytes")
    (tmp_path / ".out.partial").mkdir()
    events: list[PrepareEvent] = []
    done: list[object] = []
    with open(tmp_path / ".out.partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: done.append(prepare(config, tmp_path / "out", events.append)))
        waiting.start()
        deadline = time.monotonic() + 20
        while not any("waiting for another" in event.stage for event in events) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not done and "waiting for another" in events[-1].stage
    waiting.join(60)
    assert done == [tmp_path / "out"]


def test_a_hub_dataset_is_fetched_once_and_its_spool_removed(tmp_path, monkeypatch, text_of):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    texts = [text_of(400, i) for i in range(50)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = DataConfig(paths=(f"hf:{tmp_path}/set",), tokenizer="bytes", holdout=0.2)
    folder = prepare(config)
    prepared = Prepared.open(folder)
    assert sorted(documents(prepared, "train") + documents(prepared, "heldout")) == sorted(texts)
    assert not list(folder.glob("hub-*"))
    assert prepared.document_at("train", 0).startswith(f"hf:{tmp_path}/set (document ")
    with monkeypatch.context() as patch:
        patch.setattr(module, "scan", None)
        assert prepare(config) == folder
    limited = Prepared.open(prepare(DataConfig(paths=config.paths, tokenizer="bytes", limit="3kB")))
    assert limited.bytes("train") + limited.bytes("heldout") <= 3000


MEASURE = """
import sys
from podling.config import DataConfig
from podling.data.prepare import prepare
prepare(DataConfig(paths=(sys.argv[1],), tokenizer=sys.argv[2], vocab_size=340, cache=sys.argv[3]))
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss would start from the parent's
"""


def peak_mb(path, tokenizer, cache):
    command = [sys.executable, "-c", MEASURE, str(path), tokenizer, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) / 1e3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(("tokenizer", "sizes_mb", "most_mb"), [("bytes", (50, 200), 300), ("bpe", (12, 50), 700)])
def test_memory_is_flat_and_one_long_line_is_no_exception(tmp_path, text_of, tokenizer, sizes_mb, most_mb):
    """Four times the text takes no more memory, nor does a single line of 50 MB (bare `tokenizers`: 6.9 GB)."""
    lines = text_of(900_000)
    line = lines.replace("\n", " ")
    peaks = []
    for block, size_mb in [(lines, sizes_mb[0]), (lines, sizes_mb[1]), (line, 50)]:
        path = tmp_path / "text.txt"
        path.write_text(block * (size_mb * 10**6 // len(block.encode())))
        peaks.append(peak_mb(path, tokenizer, tmp_path / "cache"))
    print("peak MB:", peaks)
    assert max(peaks) < most_mb, peaks
    assert max(peaks) < 1.2 * min(peaks), peaks
