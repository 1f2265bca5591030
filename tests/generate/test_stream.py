"""Streams of text: the pieces join to the whole, characters are never cut, stop strings never show."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podling.generate.stream import Detokenizer, StopStrings


class ByteTokenizer:
    """One id a byte."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids):
        return bytes(ids)

    def token_bytes(self):
        return [1] * 256


class WordTokenizer:
    """A tokenizer whose text depends on what stands before: no space before the first word."""

    words = ("the", "日本", "cat", "\ufffd", "é")

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)

    def decode_bytes(self, ids):
        raise AssertionError("has no exact bytes")

    def token_bytes(self):
        return None


class ByteFallbackTokenizer(ByteTokenizer):
    """As SentencePiece writes rare characters: byte by byte, though most ids have no fixed bytes."""

    def token_bytes(self):
        return None


def pieces(tokenizer, ids, sizes):
    stream, out, at = Detokenizer(tokenizer), [], 0
    for size in sizes:
        out.append(stream.push(ids[at : at + size]))
        at += size
    return [*out, stream.push(ids[at:]), stream.flush()]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), ByteFallbackTokenizer()], ids=["bytes", "fallback"])
@pytest.mark.parametrize("text", ["日本語のテキスト", "👩‍👩‍👧‍👦 family 🇯🇵", "naïve café", "plain"])
def test_a_character_comes_whole_or_not_at_all(text, tokenizer):
    ids = list(text.encode())
    stream, shown = Detokenizer(tokenizer), ""
    for n, i in enumerate(ids, start=1):
        piece = stream.push([i])
        assert "\ufffd" not in piece
        shown += piece
        # nothing is held back longer than its own character needs
        assert shown == codecs.getincrementaldecoder("utf-8")().decode(bytes(ids[:n]))
    assert shown == text and stream.flush() == ""


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(0, 5), max_size=8))
def test_pieces_of_any_bytes_join_to_the_whole(ids, sizes):
    for tokenizer in (ByteTokenizer(), ByteFallbackTokenizer()):
        assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 4), max_size=20), st.lists(st.integers(0, 3), max_size=8))
def test_pieces_of_a_context_dependent_tokenizer_join_to_the_whole(ids, sizes):
    assert "".join(pieces(WordTokenizer(), ids, sizes)) == WordTokenizer().decode(ids)


def test_an_unfinished_character_shows_at_the_end():
    stream = Detokenizer(ByteTokenizer())
    assert stream.push(list("語".encode()[:2])) == ""
    assert stream.flush() == "\ufffd"


def run_stops(stops, parts):
    matcher, out = StopStrings(stops), []
    for part in parts:
        out.append(matcher.push(part))
    stopped = matcher.stopped
    return out, (out if stopped else [*out, matcher.flush()]), stopped


def test_a_stop_string_across_pieces_is_never_shown():
    out, _, stopped = run_stops(["\n\n", "END"], ["one E", "N", "Dtwo"])
    assert out == ["one ", "", ""] and stopped


def test_a_beginning_that_comes_to_nothing_is_passed_on():
    assert run_stops(["END"], ["E", "NE", "ND"])[0] == ["", "EN", "E"[:0]]
    assert "".join(run_stops(["END"], ["one EN", "TER"])[1]) == "one ENTER"
    assert "".join(run_stops(["END"], ["one EN"])[1]) == "one EN"


alphabet = st.text("ab日", max_size=6)


@given(st.lists(alphabet.filter(bool), min_size=1, max_size=3), st.lists(alphabet, max_size=8))
def test_stops_equal_a_search_in_the_whole_text(stops, parts):
    text = "".join(parts)
    found = [text.index(s) for s in stops if s in text]
    _, shown, stopped = run_stops(stops, parts)
    assert stopped == bool(found)
    if found:
        # the match that completes first ends the text; the earliest start among those complete by then
        end = min(text.index(s) + len(s) for s in stops if s in text)
        assert not any(s in "".join(shown) for s in stops)
        assert text.startswith("".join(shown)) and len("".join(shown)) <= end
    else:
        assert "".join(shown) == text
