"""The baseline is a true distribution, counts every training token, and scores what the model is scored on."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podling.data import ngram
from podling.data.ngram import NgramBaseline
from podling.data.shards import TokenArray

VOCAB = 7
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def plain_bigram(tokens, first, second):
    """The definition, written out with dictionaries."""
    single = Counter(tokens)
    pairs = Counter(zip(tokens, tokens[1:], strict=False))
    unigram = (single[second] + len(single) / VOCAB) / (len(tokens) + len(single)) if tokens else 1 / VOCAB
    followers = {pair[1]: count for pair, count in pairs.items() if pair[0] == first}
    if not followers:
        return unigram
    total, types = sum(followers.values()), len(followers)
    return (followers.get(second, 0) + types * unigram) / (total + types)


@pytest.mark.parametrize("dense_vocab", [0, 4096])
@given(tokens=token_lists, cut=st.integers(1, 9))
def test_probabilities_sum_to_one_and_follow_the_definition(dense_vocab, tokens, cut):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "DENSE_VOCAB", dense_vocab)
        patch.setattr(ngram, "CHUNK_TOKENS", cut)
        model = NgramBaseline.fit(np.array(tokens, np.uint16), VOCAB)
    first, second = np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij")
    table = model.bigram(first, second)
    np.testing.assert_allclose(model.unigram.sum(), 1, rtol=1e-12)
    np.testing.assert_allclose(table.sum(1), 1, rtol=1e-12)
    assert (table > 0).all()
    wanted = [[plain_bigram(tokens, v, w) for w in range(VOCAB)] for v in range(VOCAB)]
    np.testing.assert_allclose(table, wanted, rtol=1e-12)


def test_scores_are_weighted_means_over_the_targets():
    tokens = TokenArray([np.array([0, 1, 0, 1, 2], np.uint16), np.array([0, 1], np.uint16)])
    model = NgramBaseline.fit(tokens, 3)
    inputs, targets = np.array([[0, 1, 2]]), np.array([[1, 2, 2]])
    weights = np.array([[1.0, 0.5, 0.0]])
    unigram, bigram = model.score(inputs, targets, weights)
    p1 = model.unigram
    assert unigram == pytest.approx(-(math.log(p1[1]) + 0.5 * math.log(p1[2])) / 1.5)
    tokens = [0, 1, 0, 1, 2, 0, 1]
    # 0 is followed by 1 only, three times; 1 by 0 and by 2.
    p_01 = (3 + 1 * p1[1]) / (3 + 1)
    p_12 = (1 + 2 * p1[2]) / (2 + 2)
    assert bigram == pytest.approx(-(math.log(p_01) + 0.5 * math.log(p_12)) / 1.5)


def test_a_bigram_beats_a_unigram_where_order_matters():
    """On a chain that follows 3 tokens in 4, the bigram must come near the chain's entropy."""
    rng = np.random.default_rng(0)
    tokens = np.zeros(200_000, np.int64)
    jumps, noise = rng.random(tokens.size) < 0.75, rng.integers(0, 50, tokens.size)
    for i in range(1, tokens.size):
        tokens[i] = (tokens[i - 1] * 7 + 3) % 50 if jumps[i] else noise[i]
    model = NgramBaseline.fit(tokens[:150_000], 50)
    held = tokens[150_000:]
    unigram, bigram = model.score(held[:-1], held[1:], np.ones(held.size - 1))
    likely = 0.75 + 0.25 / 50
    entropy = -(likely * math.log(likely) + 49 * 0.005 * math.log(0.005))
    assert unigram == pytest.approx(math.log(50), abs=0.02)
    assert bigram == pytest.approx(entropy, abs=0.03)


def test_samples_follow_the_bigram():
    """With little text both halves of the mixture weigh much, and so does the token that was seen nowhere."""
    tokens = np.random.default_rng(1).integers(0, VOCAB - 1, 30)
    model = NgramBaseline.fit(tokens, VOCAB)
    drawn = model.sample(np.random.default_rng(0), 60_000, 0)
    assert drawn.dtype == np.int32
    pairs = np.bincount(drawn[:-1].astype(np.int64) * VOCAB + drawn[1:], minlength=VOCAB**2).reshape(VOCAB, VOCAB)
    wanted = model.bigram(*np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij"))
    for first in range(VOCAB):
        deviation = np.sqrt(wanted[first] * (1 - wanted[first]) / pairs[first].sum())
        assert (abs(pairs[first] / pairs[first].sum() - wanted[first]) < 4.5 * deviation).all()
    assert (model.sample(np.random.default_rng(0), 50, 0) == drawn[:50]).all()
