"""Reading one source: bytes to documents, in chunks, so that memory does not grow with the file."""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from podling.config import DataConfig
from podling.data.opening import open_bytes
from podling.data.sources import Source, hub_parts
from podling.errors import InputError, Problem

EOT = "<|endoftext|>"
READ_BYTES = 1 << 18
LONGEST_LINE = 1 << 30
"""A .jsonl line is held in memory whole; a longer one is most likely no .jsonl."""
_EOT_LINE = re.compile(r"(?m)^<\|endoftext\|>[ \t]*\r?(?:\n|\Z)")
_LONGEST_EOT_LINE = len(EOT) + 16


@dataclass(frozen=True)
class Chunk:
    """A stretch of a document's text, cut at no particular place; `ends` marks the document's last.

    `index` counts the documents of a source from 0, the empty ones that are left out too, so that it finds the row.
    """

    text: str
    source: int
    index: int
    ends: bool
    name: str


@dataclass
class ReadCounts:
    """What a reader has to report besides the text."""

    replaced: Counter[str] = field(default_factory=Counter)
    """Invalid bytes and NULs replaced with U+FFFD, by source name (errors="replace")."""
    eot_lines: int = 0
    """Times plain text holds <|endoftext|> while it is not honoured as a boundary."""
    empty_documents: int = 0
    limited: bool = False
    """Whether there was more text than `--limit` let through."""


def read_chunks(source: Source, number: int, config: DataConfig, counts: ReadCounts) -> Iterator[Chunk]:
    """The documents of a source in order, as chunks; empty documents are counted and left out.

    Args:
        source: what to read.
        number: its place in the list of sources, carried by every chunk.
        config: text_field, errors and split_on_eot.
        counts: told what was replaced or left out.

    Raises:
        InputError: the content is not what it should be, with file and byte offset, line or row.
    """
    index, started = 0, False
    for text, ends in _texts(source, config, counts):
        if text or (ends and started):
            yield Chunk(text, number, index, ends, source.name)
        started = started or bool(text)
        if ends:
            counts.empty_documents += not started
            index, started = index + 1, False


def _texts(source: Source, config: DataConfig, counts: ReadCounts) -> Iterator[tuple[str, bool]]:
    if source.kind == "hub":
        return ((text, True) for text in hub_texts(source, config, counts))
    assert source.path is not None
    if source.kind == "parquet":
        return _parquet_rows(source, config, counts)
    return _stream(source, config, counts)


def _stream(source: Source, config: DataConfig, counts: ReadCounts) -> Iterator[tuple[str, bool]]:
    assert source.path is not None
    with open_bytes(source.path, source.compression) as stream:
        if source.kind == "jsonl":
            yield from _jsonl_lines(source, stream, config, counts)
            return
        texts = _decoded(source, stream, config, counts)
        if config.split_on_eot:
            yield from _split_on_eot(texts)
            return
        for text in texts:
            counts.eot_lines += text.count(EOT)
            yield text, False
        yield "", True


def _decoded(source: Source, stream: IO[bytes], config: DataConfig, counts: ReadCounts) -> Iterator[str]:
    """Decode UTF-8 as it comes; a byte order mark at the start is no text and is dropped."""
    offset, held = 0, b""
    while True:
        block = stream.read(READ_BYTES)
        data = held + block
        if offset == 0 and data.startswith(codecs.BOM_UTF8):
            data, offset = data[3:], 3
        text, used = _decode(source, data, offset, not block, config, counts)
        if text:
            yield text
        if not block:
            return
        offset, held = offset + used, data[used:]


def _decode(
    source: Source, data: bytes, offset: int, final: bool, config: DataConfig, counts: ReadCounts, where: str = ""
) -> tuple[str, int]:
    """Text of `data` (which starts at byte `offset` of the source) and how many bytes of it were used."""
    if (nul := data.find(0)) >= 0:
        if config.errors == "strict":
            what = f"NUL byte at byte {offset + nul}: this is not text"
            fix = "leave it out, remove the NULs (tr -d '\\000'), or replace them with U+FFFD: --errors replace"
            raise InputError(Problem(where or source.name, what, fix))
        counts.replaced[source.name] += data.count(0)
    try:
        text, used = codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        if config.errors == "strict":
            place = offset + error.start
            what = f"invalid UTF-8 at byte {place} (0x{data[error.start]:02x}): {error.reason}"
            fix = "convert it (iconv -f ENCODING -t UTF-8), or go on with U+FFFD in place: --errors replace"
            if place == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                fix = "it looks like UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
            raise InputError(Problem(where or source.name, what, fix)) from error
        text, used = codecs.utf_8_decode(data, "replace", final)
        counts.replaced[source.name] += text.count("\ufffd") - data[:used].count("\ufffd".encode())
    return (text.replace("\0", "\ufffd") if nul >= 0 else text), used


def _split_on_eot(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """End a document at each line holding only <|endoftext|>, wherever the chunks were cut."""
    held, at_line_start, ended = "", True, True
    for text in texts:
        held += text
        # An end-of-text line may still be arriving: keep the last line back while it is short enough to be one.
        line = held.rfind("\n") + 1
        ready = line if len(held) - line <= _LONGEST_EOT_LINE else len(held)
        for part, ended in _ended(held[:ready], at_line_start):
            yield part, ended
        at_line_start = (held[ready - 1] == "\n") if ready else at_line_start
        held = held[ready:]
    for part, ended in _ended(held, at_line_start):
        yield part, ended
    if not ended:
        yield "", True


def _ended(text: str, at_line_start: bool) -> Iterator[tuple[str, bool]]:
    start = 0
    for match in _EOT_LINE.finditer(text):
        if match.start() > 0 or at_line_start:
            yield text[start : match.start()], True
            start = match.end()
    if start < len(text):
        yield text[start:], False


def _jsonl_lines(
    source: Source, stream: IO[bytes], config: DataConfig, counts: ReadCounts
) -> Iterator[tuple[str, bool]]:
    offset = 0
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), 1):
        where = f"{source.name}:{number}"
        if len(line) == LONGEST_LINE:
            what = f"is a line of over {LONGEST_LINE:,} bytes: each line must be one JSON object"
            raise InputError(Problem(where, what, "convert an array of objects with jq -c '.[]'"))
        text, _ = _decode(source, line, offset, True, config, counts, where)
        offset += len(line)
        text = text.removeprefix("\ufeff") if number == 1 else text
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            what = f"is not JSON: {error.msg} (column {error.colno})"
            raise InputError(Problem(where, what, "each line must be one JSON object")) from error
        except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
            raise InputError(Problem(where, f"is JSON that Python will not read: {error}")) from error
        if not isinstance(row, dict):
            raise InputError(Problem(where, f"is a JSON {type(row).__name__}", "each line must be one JSON object"))
        yield _field(source, where, row, config, counts), True


def _parquet_rows(source: Source, config: DataConfig, counts: ReadCounts) -> Iterator[tuple[str, bool]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert source.path is not None
    try:
        with pq.ParquetFile(source.path) as file:
            if config.text_field not in file.schema_arrow.names:
                raise _missing(source.name, "column", config, file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(batch_size=64, columns=[config.text_field]):
                for value in batch.column(0):
                    where = f"{source.name} row {row}"
                    yield _field(source, where, {config.text_field: value.as_py()}, config, counts), True
                    row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(Problem(source.name, f"is not sound parquet: {error}")) from error


def hub_texts(source: Source, config: DataConfig, counts: ReadCounts) -> Iterator[str]:
    """The text of every row of a hub dataset, the empty ones too, streamed.

    Raises:
        InputError: the dataset cannot be found or read, or a row has no text.
    """
    import datasets  # pyright: ignore[reportMissingImports] - an extra

    path, name, split = hub_parts(source.name)
    try:
        rows = datasets.load_dataset(path, name, split=split, streaming=True)
        for number, row in enumerate(rows):
            yield _field(source, f"{source.name} row {number}", row, config, counts)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds; all of them mean that the dataset cannot be read
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        fix = "check owner, name, config and split, and the network; or give local files"
        raise InputError(Problem(source.name, f"cannot be read: {reason}", fix)) from error


def _field(source: Source, where: str, row: Any, config: DataConfig, counts: ReadCounts) -> str:
    if config.text_field not in row:
        raise _missing(where, "field", config, list(row))
    text = row[config.text_field]
    if not isinstance(text, str):
        what = f"field {config.text_field!r} is {type(text).__name__}, not text"
        raise InputError(Problem(where, what, "fix or remove the row, or choose another with --text-field"))
    if "\0" in text or (not text.isascii() and re.search("[\ud800-\udfff]", text)):
        bad = len(re.findall("[\0\ud800-\udfff]", text))
        if config.errors == "strict":
            what = f"field {config.text_field!r} holds {bad} NUL or lone surrogate characters, which are not text"
            raise InputError(Problem(where, what, "remove them, or replace them with U+FFFD: --errors replace"))
        counts.replaced[source.name] += bad
        text = re.sub("[\0\ud800-\udfff]", "\ufffd", text)
    return text


def _missing(where: str, what: str, config: DataConfig, names: list[str]) -> InputError:
    shown = ", ".join(map(str, names[:20])) or "none"
    fix = f"choose one with --text-field; there are: {shown}"
    return InputError(Problem(where, f"no {what} {config.text_field!r}", fix))
