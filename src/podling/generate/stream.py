"""Text out of a stream of token ids: characters stay whole, stop strings never show.

A token may hold part of a character (Japanese, emoji), and a stop string may begin in one token and end three later.
Both classes therefore hold back exactly what is still undecided, and nothing more.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """What a stream needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...  # noqa: D102
    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...  # noqa: D102
    def token_bytes(self) -> list[int] | None: ...  # noqa: D102


class Detokenizer:
    """Turns ids into text piece by piece; the pieces joined are the text of all ids decoded at once."""

    def __init__(self, tokenizer: Decodes):
        self._tokenizer = tokenizer
        self._by_bytes = tokenizer.token_bytes() is not None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids complete; bytes of an unfinished character wait for the next call."""
        if self._by_bytes:
            return self._utf8.decode(self._tokenizer.decode_bytes(ids))
        self._ids += ids
        # Such tokenizers (SentencePiece forms) decide spaces by what stands before, so only whole prefixes compare.
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        """What is still held back, at the end: an unfinished character shows as U+FFFD."""
        if self._by_bytes:
            return self._utf8.decode(b"", final=True)
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._shown = text
        return piece


class StopStrings:
    """Passes text on until one of the stop strings appears; none of its characters are ever passed on."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is certainly not part of a stop string. After a stop (`stopped`) always empty."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
