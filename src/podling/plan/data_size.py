"""How many training tokens a person's text holds: counted where it is prepared, guessed from its bytes elsewhere."""

import math
from pathlib import Path

from podling.config import DataConfig
from podling.data.sources import Source, find_sources, is_prepared
from podling.files import parse_bytes, read_json, show_bytes

GPT2_BYTES = 4.5
"""A token of a vocabulary of 30,000 or more, of English."""
BPE_BYTES, BPE_SIZE, BPE_GROWTH = 3.2, 2048, 0.4
"""A trained vocabulary: 3.2 bytes a token at 2048 entries and 0.4 more each time it doubles.

Counted with `podling prepare` on English prose (22.7 MB: 3.14 at 2048, 4.01 at 8192, 4.50 at 32768) and on Python's
standard library (9.2 MB: 2.71 at 1024, 3.19 at 2048, 3.60 at 4096).
"""
TEXT_SHARE = {"text": 1.0, "jsonl": 0.9, "parquet": 2.5}
"""Bytes of text in a byte of the file; Parquet packs its columns."""
PACKED = 3.0  # .gz and .zst of prose


def data_tokens(data: DataConfig) -> tuple[int | None, str]:
    """Training tokens, and in words how they are known; None where nothing tells.

    Args:
        data: with paths; the held-out share is left out of the count.

    Raises:
        InputError: a path is missing, or holds nothing to read.
    """
    if not data.paths:
        return None, ""
    if len(data.paths) == 1 and is_prepared(data.paths[0]):
        manifest = read_json(Path(data.paths[0]) / "manifest.json")
        return manifest["splits"]["train"]["tokens"], ""
    sources = find_sources(data)
    if any(source.kind == "hub" for source in sources):
        return None, "data: how much a hub dataset holds is known when podling prepare has read it"
    text_bytes = sum(map(_text_bytes, sources))
    if data.limit:
        text_bytes = min(text_bytes, parse_bytes(data.limit, "--limit"))
    each = bytes_per_token(data)
    tokens = round(text_bytes * (1 - data.holdout) / each)
    words = f"data: {show_bytes(text_bytes)} of text, taken as {each:.1f} bytes a token"
    if any(source.compression or source.kind == "parquet" for source in sources):
        words = words.replace(" of text", " of text, unpacked, by a guess")
    return tokens, f"{words}: a guess; podling prepare counts them"


def heldout_tokens(data: DataConfig, train_tokens: int | None) -> float | None:
    """Held-out tokens: counted where the data is prepared, by the share held out elsewhere; None where nothing tells.

    Args:
        data: as for `data_tokens`.
        train_tokens: what `data_tokens` said.
    """
    if len(data.paths) == 1 and is_prepared(data.paths[0]):
        return read_json(Path(data.paths[0]) / "manifest.json")["splits"]["heldout"]["tokens"]
    return None if train_tokens is None else train_tokens * data.holdout / (1 - data.holdout)


def bytes_per_token(data: DataConfig) -> float:
    """A guess, from the tokenizer alone; other languages and code have fewer bytes a token."""
    if data.tokenizer in ("bytes", "char"):
        return 1.0
    if data.tokenizer == "bpe":
        grown = BPE_BYTES + BPE_GROWTH * math.log2(max(data.vocab_size, 1) / BPE_SIZE)
        return min(GPT2_BYTES, max(1.0, grown))
    return GPT2_BYTES


def _text_bytes(source: Source) -> float:
    return source.size_bytes * TEXT_SHARE.get(source.kind, 1.0) * (PACKED if source.compression else 1.0)
