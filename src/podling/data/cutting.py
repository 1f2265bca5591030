r"""Cutting long text where the tokenizer would have cut it anyway.

A tokenizer first splits text into pre-tokens with a regular expression and then works inside each. Text cut exactly
between two pre-tokens therefore gives the same ids as the whole, and needs the memory of a piece. GPT-2's expression is

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

(Radford et al. 2019, encoder.py). It has no look-behind, so what follows a boundary never depends on what is before
it. What is before it stays the same when the cut text ends there if no match reaches over the cut, which holds
between a and b when a is not white space and

- b is white space: white space only ever starts a match, and `\s+(?!\S)` looks one character past white space, so
  never past a; or
- a and b are of different classes (letter, number, other) and a is not an apostrophe, the one character that may be
  joined to letters after it.

Only characters whose class is the same in every version of Unicode are used, so that Python's tables and the
tokenizer's need not agree. Newer tokenizers (GPT-4, Llama 3, Qwen) join punctuation with letters or newlines; for them
the cut is only between a letter or digit and a space or newline, where none of their expressions has a match across.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from podling.data.readers import Chunk
from podling.errors import InputError, Problem

Family = Literal["any", "gpt2", "words", "never"]
"""Where a tokenizer's text may be cut: anywhere, by GPT-2's classes, between words only, or nowhere."""

PIECE_CHARS = 16_384
"""Long text is cut at the last safe place before this many characters."""
RUN_CHARS = 1_000_000
"""A run of this many characters without a safe place (one endless word) is cut regardless, counted and reported."""
WHOLE_CHARS = 8_000_000
"""Longest document for a tokenizer whose text cannot be cut: about 1 GB of working memory."""

_CJK = "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5"
_LETTER = "A-Za-z" + _CJK
_OTHER = r"!-&(-/:-@\[-`{-~\u3001\u3002\u300c-\u300f\uff01\uff1f"  # ASCII and Japanese punctuation but the apostrophe
_SAFE = {
    "gpt2": re.compile(
        r"(?<=[^\s\u180e\u200b\ufeff])(?=[ \n\r\t])"
        f"|(?<=[{_LETTER}])(?=[0-9'{_OTHER}])|(?<=[0-9])(?=['{_OTHER}{_LETTER}])|(?<=[{_OTHER}])(?=[{_LETTER}0-9])"
    ),
    "words": re.compile(f"(?<=[{_LETTER}0-9])(?=[ \n])"),
}


@dataclass(frozen=True)
class Piece:
    """Part of a document, short enough to tokenize; `ends` marks its last."""

    text: str
    source: int
    index: int
    ends: bool


class Cutter:
    """Cuts streamed documents into pieces and counts the cuts that could not be made exact."""

    def __init__(self, family: Family):
        self.family: Family = family
        self.forced_cuts = 0

    def pieces(self, chunks: Iterable[Chunk]) -> Iterator[Piece]:
        """Re-cut chunks at safe places; the pieces of a document join to exactly its text.

        Raises:
            InputError: a document is too long for a tokenizer whose text cannot be cut.
        """
        held = ""
        for chunk in chunks:
            text, start = held + chunk.text, 0
            while (end := self._cut(text, start, chunk)) > start:
                yield Piece(text[start:end], chunk.source, chunk.index, False)
                start = end
            held = text[start:]
            if chunk.ends:
                yield Piece(held, chunk.source, chunk.index, True)
                held = ""

    def _cut(self, text: str, start: int, chunk: Chunk) -> int:
        """End of the next piece, or `start` when the rest has to wait for more text (or for the document's end)."""
        left = len(text) - start
        if self.family == "never":
            if left > WHOLE_CHARS:
                what = f"document {chunk.index} has over {WHOLE_CHARS:,} characters, and this tokenizer needs it whole"
                fix = "split it into documents (.jsonl, --split-on-eot), or use --tokenizer bpe"
                raise InputError(Problem(chunk.name, what, fix))
            return start
        if left <= PIECE_CHARS:
            return start
        if self.family == "any":
            return start + PIECE_CHARS
        end = last_safe_cut(text, start, start + PIECE_CHARS, self.family)
        if end == start and (match := _SAFE[self.family].search(text, start + PIECE_CHARS, start + RUN_CHARS)):
            end = match.start()
        if end == start and left > RUN_CHARS:
            self.forced_cuts += 1
            return start + RUN_CHARS
        return end


def last_safe_cut(text: str, start: int, end: int, family: Literal["gpt2", "words"]) -> int:
    """The last place in (start, end] where `text` can be cut without changing any id, or `start` if there is none."""
    width = 256
    while True:
        low = max(start + 1, end - width)
        found = start
        for match in _SAFE[family].finditer(text, low, min(end + 1, len(text))):
            found = match.start()
        if found > start or low == start + 1:
            return found
        width *= 8
