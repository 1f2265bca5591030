"""The documents of prepared data one by one: what they are called, and which tokens are theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from podling.data.shards import Prepared, SplitName


@dataclass(frozen=True)
class DocumentPlace:
    """One document, or the part of it that lies in the splits that were asked for."""

    source: int
    index: int
    """Its place within the source, from 0."""
    ranges: list[tuple[SplitName, int, int]] = field(default_factory=list)
    """Where its tokens lie: from, and up to, the nth token of a split."""

    @property
    def tokens(self) -> int:
        """How many, any end-of-text included."""
        return sum(end - start for _, start, end in self.ranges)


def list_documents(prepared: Prepared, splits: Sequence[SplitName]) -> list[DocumentPlace]:
    """Every document that has tokens in these splits, in reading order, each once."""
    found: dict[tuple[int, int], DocumentPlace] = {}
    for split in splits:
        offset = 0
        shards = prepared.manifest["splits"][split]["shards"]
        for shard, table in zip(shards, prepared.document_tables[split], strict=True):
            ends = [*table["start"][1:].tolist(), shard["tokens"]]
            for (start, source, index), end in zip(table.tolist(), ends, strict=True):
                if end > start:
                    document = found.setdefault((source, index), DocumentPlace(source, index))
                    document.ranges.append((split, offset + start, offset + end))
            offset += shard["tokens"]
    return [found[key] for key in sorted(found)]


def document_tokens(prepared: Prepared, document: DocumentPlace) -> np.ndarray:
    """Its tokens, int32, with the end-of-text that closes it.

    Where the document is divided between training and held-out text, each part is closed by an end-of-text of its own:
    only the last one is the document's.
    """
    parts: list[np.ndarray] = []
    for number, (split, start, end) in enumerate(document.ranges):
        if number and split != document.ranges[number - 1][0] and parts[-1][-1] == prepared.tokenizer.eot_id:
            parts[-1] = parts[-1][:-1]
        parts.append(prepared.tokens(split)[start:end])
    return np.concatenate(parts)
