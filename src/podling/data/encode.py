"""The tokenizing pass: pieces to ids on all cores, ids to shards, a segment at a time."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podling.config import DataConfig
from podling.data.corpus import Sources, iter_chunks
from podling.data.cutting import Cutter
from podling.data.events import Meter
from podling.data.scan import Split
from podling.data.tokenizer import Tokenizer
from podling.errors import InputError, Problem
from podling.files import atomic_write, read_json

if TYPE_CHECKING:
    import numpy as np

BATCH_BYTES = 4_000_000
"""Text tokenized at once; the library needs about 60 bytes for each byte of it, and two batches are in flight."""
SEGMENT_BYTES = 64_000_000
"""Text per shard, and the most that a killed prepare has to do again."""


@dataclass(frozen=True)
class Part:
    """Text of one document that goes to one split (0 train, 1 held out)."""

    text: str
    split: int
    source: int
    index: int
    ends: bool
    text_bytes: int


def encode_segments(
    folder: Path, sources: Sources, config: DataConfig, split: Split, tokenizer: Tokenizer, meter: Meter
) -> dict[str, Any]:
    """Write all shards to `folder`, after those that an earlier attempt finished there.

    A segment is finished when its segment-NNNNN.json exists; until then its files are written anew.

    Returns:
        splits (for the manifest), forced_cuts, unknown (tokens), and changed_bytes: by how much the bytes that the
        tokens stand for differ from the text's, which a vocabulary without all bytes or with a normalizer can cause.

    Raises:
        InputError: a split would be empty, or the text cannot be tokenized.
        RunError: the disk is full.
    """
    cutter = Cutter(tokenizer.family)
    batches = _batches(_split_parts(cutter, sources, config, split))
    segments: list[dict[str, Any]] = []
    while (path := folder / f"segment-{len(segments):05}.json").exists():
        segments.append(read_json(path))
        for _ in range(segments[-1]["batches"]):
            next(batches)
        done = [shard for shard in segments[-1]["shards"].values() if shard]
        meter.skip(sum(shard["text_bytes"] for shard in done), sum(shard["tokens"] for shard in done))
    encoded = _encoded(batches, tokenizer)
    while segment := _write_segment(folder, len(segments), encoded, tokenizer, meter):
        atomic_write(folder / f"segment-{len(segments):05}.json", json.dumps(segment))
        segments.append(segment)
    totals = _totals(segments)
    for name, what in (("train", "train"), ("heldout", "evaluate")):
        if totals["splits"][name]["text_bytes"] == 0 and (name, split.rule) != ("heldout", "none"):
            fix = "give more text, or change --data.holdout"
            raise InputError(Problem("--data", f"the text is too short: nothing would be left to {what} on", fix))
    return {**totals, "forced_cuts": cutter.forced_cuts}


def _split_parts(cutter: Cutter, sources: Sources, config: DataConfig, split: Split) -> Iterator[Part]:
    """Pieces with their split; the piece where a document's held-out tail begins is divided."""
    document = place = 0
    train_bytes, in_tail = split.train_bytes(0), False
    for piece in cutter.pieces(iter_chunks(sources, config)):
        size = len(piece.text.encode())
        if not in_tail and place + size > train_bytes:
            cut = _line_after(piece.text, train_bytes - place) if train_bytes else 0
            head = piece.text[:cut]
            if head:
                head_bytes = len(head.encode())
                yield Part(head, 0, piece.source, piece.index, True, head_bytes)
                size -= head_bytes
            elif place:
                yield Part("", 0, piece.source, piece.index, True, 0)
            in_tail = True
            if cut < len(piece.text):
                yield Part(piece.text[cut:], 1, piece.source, piece.index, piece.ends, size)
        else:
            yield Part(piece.text, int(in_tail), piece.source, piece.index, piece.ends, size)
        place += len(piece.text.encode())
        if piece.ends:
            document, place, in_tail = document + 1, 0, False
            train_bytes = split.train_bytes(document) if document < len(split.sizes_bytes) else 0


def _line_after(text: str, offset_bytes: int) -> int:
    """Where to divide `text` at or after a byte: after the next newline, else after white space, else right there."""
    place = len(text.encode()[:offset_bytes].decode(errors="ignore"))
    match = re.compile(r"\n").search(text, place)
    if match is None or match.end() == len(text):  # a newline at the very end would leave nothing to hold out
        match = re.compile(r"\s").search(text, place) or match
    return match.end() if match else place


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    held = 0
    for part in parts:
        batch.append(part)
        held += part.text_bytes + 64  # tiny documents have a cost of their own
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _encoded(batches: Iterator[list[Part]], tokenizer: Tokenizer) -> "Iterator[tuple[list[Part], list[np.ndarray]]]":
    """Tokenize one batch in a thread (the library uses all cores for it) while the one before it is written."""

    def submit() -> "tuple[list[Part], Future[list[np.ndarray]]] | None":
        batch = next(batches, None)
        if batch is None:
            return None
        return batch, pool.submit(tokenizer.encode_batch, [part.text for part in batch])

    with ThreadPoolExecutor(1) as pool:
        pending = submit()
        while pending:
            following = submit()
            yield pending[0], pending[1].result()
            pending = following


def _write_segment(
    folder: Path,
    number: int,
    encoded: "Iterator[tuple[list[Part], list[np.ndarray]]]",
    tokenizer: Tokenizer,
    meter: Meter,
) -> dict[str, Any] | None:
    """Write the next SEGMENT_BYTES of text; None when there is no more."""
    import numpy as np

    from podling.data.shards import SPLITS, ShardWriter

    writers = [ShardWriter(folder, f"{name}-{number:05}", tokenizer.vocab_size, tokenizer.eot_id) for name in SPLITS]
    bytes_of = tokenizer.token_bytes()
    lengths = None if bytes_of is None else np.array(bytes_of, np.int64)
    batches = unknown = changed = 0
    try:
        for batch, ids in encoded:
            batches += 1
            for split, writer in enumerate(writers):
                writer.add(
                    (array, part.source, part.index, part.ends, part.text_bytes)
                    for part, array in zip(batch, ids, strict=True)
                    if part.split == split
                )
            tokens = np.concatenate(ids)
            text_bytes = sum(part.text_bytes for part in batch)
            if tokenizer.unk_id is not None:
                unknown += int(np.count_nonzero(tokens == tokenizer.unk_id))
            if lengths is not None:
                changed += abs(text_bytes - int(lengths[tokens].sum()))
            meter.add(text_bytes, tokens.size)
            if sum(writer.text_bytes for writer in writers) >= SEGMENT_BYTES:
                break
        shards = {name: writer.finish() for name, writer in zip(SPLITS, writers, strict=True)}
    finally:
        for writer in writers:
            writer.abandon()
    return {"batches": batches, "unknown": unknown, "changed_bytes": changed, "shards": shards} if batches else None


def _totals(segments: list[dict[str, Any]]) -> dict[str, Any]:
    splits = {}
    for name in ("train", "heldout"):
        shards = [segment["shards"][name] for segment in segments if segment["shards"][name]]
        splits[name] = {
            "tokens": sum(shard["tokens"] for shard in shards),
            "text_bytes": sum(shard["text_bytes"] for shard in shards),
            "documents": sum(shard["ended"] for shard in shards),
            "shards": shards,
        }
    counted = {name: sum(segment[name] for segment in segments) for name in ("unknown", "changed_bytes")}
    return {"splits": splits, **counted}
