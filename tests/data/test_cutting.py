"""Ids of text cut into pieces are exactly the ids of the whole."""

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from podling.data import cutting
from podling.data.cutting import Cutter, last_safe_cut
from podling.data.readers import Chunk
from podling.data.tokenizer_spec import GPT2_PATTERN, WORD_PATTERNS
from podling.errors import InputError

# Everything that GPT-2's expression tells apart, and what Python and Unicode have disagreed on.
ALPHABET = "aZé'stredvml 019²Ⅷ\n\r\t\u00a0\u0085\u2028\u3000\x1c\x0b\u180e\u200b\ufeff"
ALPHABET += '.,!_-"日本ひカー・。、」「！？゛ヽ\u0301😀'
texts = st.text(st.sampled_from(ALPHABET) | st.characters(codec="utf-8"), max_size=60)
pieces_of_text = st.lists(
    st.sampled_from(
        ["'s", "'ll", "'", " '", "can't", "  ", " \n ", " a", "b1", "。あ", "、、", "x_y", "\u3000", "!'re"]
    )
    | texts,
    max_size=12,
).map("".join)

PRE_TOKENIZERS = {
    "gpt2": [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(Regex(GPT2_PATTERN), "isolated"),
    ],
    "words": [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORD_PATTERNS],
}


@pytest.mark.parametrize("family", ["gpt2", "words"])
@settings(max_examples=600)
@given(text=pieces_of_text)
@example("don't  stop\n\n  'tis 3.14,ok。日本語、カタカナ!'s")
def test_every_safe_place_is_a_boundary_that_changes_nothing(family, text):
    """Pre-tokens decide the ids, so it is enough that the pre-tokens of both sides are those of the whole."""
    places = [match.start() for match in cutting._SAFE[family].finditer(text)]
    for pre in PRE_TOKENIZERS[family]:
        whole = [token for token, _ in pre.pre_tokenize_str(text)]
        for place in places:
            left, right = ([token for token, _ in pre.pre_tokenize_str(part)] for part in (text[:place], text[place:]))
            assert left + right == whole, (text[:place], text[place:])


@pytest.mark.parametrize("family", ["gpt2", "words"])
def test_every_pair_of_characters_is_cut_rightly(family):
    """All pairs of the alphabet, bare and between others, since chance may not try the one that is wrong."""
    wrong = []
    for first, second in itertools.product(ALPHABET, repeat=2):
        for before, after in [("", ""), ("x", "s"), ("'", "'"), (" ", " ")]:
            text, place = before + first + second + after, len(before) + 1
            if not cutting._SAFE[family].match(text, place):
                continue
            for pre in PRE_TOKENIZERS[family]:
                whole, left, right = (
                    [token for token, _ in pre.pre_tokenize_str(part)] for part in (text, text[:place], text[place:])
                )
                if left + right != whole:
                    wrong.append(text)
    assert not wrong


@given(text=pieces_of_text, start=st.integers(0, 20), width=st.integers(1, 600))
def test_the_last_safe_place_is_found(text, start, width):
    text = text * 20
    if start + width >= len(text):
        return
    places = [match.start() for match in cutting._SAFE["gpt2"].finditer(text)]
    wanted = max((place for place in places if start < place <= start + width), default=start)
    assert last_safe_cut(text, start, start + width, "gpt2") == wanted


@pytest.mark.parametrize("family", ["gpt2", "words", "any"])
@given(data=st.data(), documents=st.lists(pieces_of_text.filter(bool), min_size=1, max_size=4))
def test_pieces_join_to_the_documents_however_they_arrive(family, data, documents):
    """Neither the text nor the places of the cuts depend on how the reader's chunks fall."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "PIECE_CHARS", 16)
        patch.setattr(cutting, "RUN_CHARS", 40)
        whole = list(Cutter(family).pieces(_chunks(documents, lambda text: len(text))))
        shredded = Cutter(family)
        assert list(shredded.pieces(_chunks(documents, lambda text: data.draw(st.integers(1, 30))))) == whole
    joined = [""]
    for piece in whole:
        joined[-1] += piece.text
        joined += [""] if piece.ends else []
        assert len(piece.text) <= 40
    assert joined == [*documents, ""]


def _chunks(documents, size_of):
    for index, text in enumerate(documents):
        while text:
            size = size_of(text)
            yield Chunk(text[:size], 0, index, len(text) <= size, "x")
            text = text[size:]


@pytest.mark.parametrize("unit", ["a", " ", "日", "!", "7"])
def test_an_endless_run_is_cut_and_counted(unit):
    cutter = Cutter("gpt2")
    pieces = list(cutter.pieces(_chunks([unit * 2_500_000], lambda text: 1 << 18)))
    assert "".join(piece.text for piece in pieces) == unit * 2_500_000
    assert max(len(piece.text) for piece in pieces) == cutting.RUN_CHARS
    assert cutter.forced_cuts == 2


def test_ordinary_text_is_never_cut_by_force():
    cutter = Cutter("gpt2")
    text = re.sub("x", "word, 日本語。", "x" * 20_000)
    pieces = list(cutter.pieces(_chunks([text], lambda text: 1 << 18)))
    assert cutter.forced_cuts == 0
    assert max(len(piece.text) for piece in pieces) <= cutting.PIECE_CHARS


def test_a_tokenizer_that_needs_whole_documents_refuses_a_long_one():
    chunks = _chunks(["short", "a " * 4_000_001], lambda text: 1 << 18)
    pieces = Cutter("never").pieces(chunks)
    assert next(pieces).text == "short"
    with pytest.raises(InputError, match=r"x: document 1 has over 8,000,000 characters(.|\n)*--split-on-eot"):
        next(pieces)
