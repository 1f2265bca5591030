"""Sources become documents: whole, or as chunks where memory must not grow with them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from podling.config import DataConfig
from podling.data.readers import Chunk, ReadCounts, read_chunks
from podling.data.sources import Source, Sources, find_sources
from podling.errors import InputError, Problem
from podling.files import parse_bytes

__all__ = ["Chunk", "Document", "Source", "Sources", "find_sources", "iter_chunks", "iter_documents"]


@dataclass(frozen=True)
class Document:
    """One document: `index` counts those of its source, from 0."""

    text: str
    source: str
    index: int


def iter_chunks(
    sources: Iterable[Source],
    config: DataConfig,
    counts: ReadCounts | None = None,
    problems: list[Problem] | None = None,
) -> Iterator[Chunk]:
    """All documents in order as chunks of bounded size, up to `config.limit` bytes of text.

    The document that reaches the limit is cut there.

    Args:
        sources: where to read.
        config: how to read.
        counts: told what was replaced or left out.
        problems: when given, a source that cannot be read adds its problem here, and the next one is read.

    Raises:
        InputError: content that cannot be read, with file and place.
    """
    counts = counts if counts is not None else ReadCounts()
    left = parse_bytes(config.limit, "--limit") if config.limit else None
    for number, source in enumerate(sources):
        try:
            for chunk in read_chunks(source, number, config, counts):
                if left is None:
                    yield chunk
                    continue
                data = chunk.text.encode()
                if len(data) >= left:
                    counts.limited = True
                    text = data[:left].decode(errors="ignore")
                    yield Chunk(text, chunk.source, chunk.index, True, chunk.name)
                    return
                left -= len(data)
                yield chunk
        except InputError as error:
            if problems is None:
                raise
            problems += error.problems


def iter_documents(sources: Iterable[Source], config: DataConfig) -> Iterator[Document]:
    """All documents in order, each whole in memory (`iter_chunks` has no such need).

    Raises:
        InputError: content that cannot be read, with file and place.
    """
    parts: list[str] = []
    for chunk in iter_chunks(sources, config):
        parts.append(chunk.text)
        if chunk.ends:
            yield Document("".join(parts), chunk.name, chunk.index)
            parts = []
