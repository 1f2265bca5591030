"""The first pass over the text: what there is, whether it can be read, and which of it is held out."""

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from podling.config import DataConfig
from podling.data.corpus import Sources, iter_chunks
from podling.data.events import Meter, Progress
from podling.data.readers import ReadCounts
from podling.errors import InputError, Problem, raise_if
from podling.files import counted

MOST_PROBLEMS = 20


@dataclass
class Scan:
    """Every document's size in bytes of UTF-8 and the hash of its text, in reading order."""

    sizes_bytes: array = field(default_factory=lambda: array("Q"))
    hashes: array = field(default_factory=lambda: array("Q"))
    source_bytes: list[int] = field(default_factory=list)
    source_documents: Counter[int] = field(default_factory=Counter)
    counts: ReadCounts = field(default_factory=ReadCounts)

    @property
    def total_bytes(self) -> int:
        """Bytes of text in all documents."""
        return sum(self.source_bytes)


@dataclass(frozen=True)
class Split:
    """How much of each document is for training; what follows is held out.

    `rule` is "hash" (whole documents, by the hash of their text, so that equal documents stay together), "tail" (the
    end of the only document), "tails" (the end of every document: too few for whole ones to come near the share) or
    "none" (nothing is held out and no document is divided, for text that is only scored).
    """

    rule: Literal["hash", "tail", "tails", "none"]
    holdout: float
    sizes_bytes: array
    hashes: array

    def train_bytes(self, document: int) -> int:
        """Bytes at the start of the nth document that are for training, before rounding up to a line."""
        size = self.sizes_bytes[document]
        if self.rule == "none":
            return size
        if self.rule == "hash":
            return 0 if _held_out(self.hashes[document], self.holdout) else size
        return round(size * (1 - self.holdout))

    def describe(self, documents: int) -> str:
        """The rule in words, for summaries."""
        if self.rule == "hash":
            return f"{counted(documents, 'whole document')}, chosen by the hash of their text"
        if self.rule == "none":
            return "nothing"
        if self.rule == "tail":
            return "the end of the only document"
        return "the end of each document, too few to hold out whole ones"


def scan(sources: Sources, config: DataConfig, progress: Progress | None) -> Scan:
    """Read everything once without tokenizing it.

    Raises:
        InputError: with the first problem of every source, up to MOST_PROBLEMS of them; or there is no text at all.
    """
    found = Scan(source_bytes=[0] * len(sources))
    plain = not config.limit and all(source.kind == "text" and not source.compression for source in sources)
    meter = Meter("reading", sum(source.size_bytes for source in sources) if plain else None, progress)
    problems: list[Problem] = []
    hasher, size = hashlib.blake2b(digest_size=8), 0
    for chunk in iter_chunks(sources, config, found.counts, problems):
        data = chunk.text.encode()
        hasher.update(data)
        size += len(data)
        found.source_bytes[chunk.source] += len(data)
        if chunk.ends:
            found.sizes_bytes.append(size)
            found.hashes.append(int.from_bytes(hasher.digest(), "little"))
            found.source_documents[chunk.source] += 1
            hasher, size = hashlib.blake2b(digest_size=8), 0
        meter.add(len(data))
        if len(problems) >= MOST_PROBLEMS:
            break
    meter.finish()
    raise_if(problems)
    if not found.sizes_bytes:
        names = ", ".join(source.name for source in sources[:5])
        raise InputError(Problem(names, "holds no text", "give a file with some"))
    return found


def choose_split(found: Scan, holdout: float) -> Split:
    """Hold out about `holdout` of the text.

    Raises:
        InputError: nothing, or everything, would be held out.
    """
    if not 0 < holdout < 1:
        what = f"{holdout:g} leaves nothing to {'evaluate' if holdout <= 0 else 'train'} on"
        raise InputError(Problem("--data.holdout", what, "choose a share between 0 and 1, such as 0.05"))
    rule: Literal["hash", "tail", "tails"] = "hash"
    if len(found.sizes_bytes) == 1:
        rule = "tail"
    else:
        pairs = zip(found.sizes_bytes, found.hashes, strict=True)
        share = sum(size for size, key in pairs if _held_out(key, holdout)) / found.total_bytes
        if not holdout / 2 <= share <= min(2 * holdout, (1 + holdout) / 2):
            rule = "tails"
    return Split(rule, holdout, found.sizes_bytes, found.hashes)


def hold_nothing_out(found: Scan) -> Split:
    """Every document whole, in reading order: text to score, with nothing to choose or divide."""
    return Split("none", 0.0, found.sizes_bytes, found.hashes)


def _held_out(key: int, holdout: float) -> bool:
    return key < holdout * 2**64
