"""What counting alone can do: an interpolated bigram, the figure a trained model has to beat.

Witten-Bell smoothing (Witten & Bell 1991; Chen & Goodman 1999, section 2.6): a context that was followed by `types`
different tokens in `total` occurrences gives the shorter model the weight types / (types + total). With N tokens of
which U different, and c(v·) and t(v) the number of tokens and of different tokens seen right after v:

    p1(w)   = (c(w) + U / V) / (N + U)
    p2(w|v) = (c(v, w) + t(v) · p1(w)) / (c(v·) + t(v))
"""

from dataclasses import dataclass

import numpy as np

from podling.data.shards import TokenArray

CHUNK_TOKENS = 1 << 22
DENSE_VOCAB = 4096
"""Up to this vocabulary pairs are counted in a V x V table (134 MB), above it by sorting."""


@dataclass(frozen=True)
class NgramBaseline:
    """Unigram and bigram counts of a token stream.

    Attributes:
        vocab_size: V.
        unigram: p1, float64 [V].
        pairs: the pairs that occur, as v · V + w, sorted, int64 [pairs].
        counts: how often each occurs, int64 [pairs].
        followed: how often each token is followed by another, c(v), int64 [V].
        types: by how many different tokens, int64 [V].
    """

    vocab_size: int
    unigram: np.ndarray
    pairs: np.ndarray
    counts: np.ndarray
    followed: np.ndarray
    types: np.ndarray

    @classmethod
    def fit(cls, tokens: TokenArray | np.ndarray, vocab_size: int) -> "NgramBaseline":
        """Count all of `tokens` (ids below `vocab_size`), a chunk at a time.

        Memory is that of the pairs that occur, 16 bytes each, and a chunk's.
        """
        single = np.zeros(vocab_size, np.int64)
        for _, chunk in _chunks(tokens, 0):
            single += np.bincount(chunk, minlength=vocab_size)
        count_pairs = _dense_pairs if vocab_size <= DENSE_VOCAB else _sparse_pairs
        pairs, counts = count_pairs(tokens, vocab_size)
        firsts = pairs // vocab_size
        followed = np.bincount(firsts, weights=counts, minlength=vocab_size).astype(np.int64)
        types = np.bincount(firsts, minlength=vocab_size)
        seen = np.count_nonzero(single)
        unigram = (single + seen / vocab_size) / (single.sum() + seen) if seen else np.full(vocab_size, 1 / vocab_size)
        return cls(vocab_size, unigram, pairs, counts, followed, types)

    def bigram(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """p2(second | first), float64 of the shape of both."""
        first, second = np.asarray(first, np.int64), np.asarray(second, np.int64)
        pair = first * self.vocab_size + second
        place = np.minimum(np.searchsorted(self.pairs, pair), max(len(self.pairs) - 1, 0))
        count = np.zeros(pair.shape)
        if len(self.pairs):
            count = np.where(self.pairs[place] == pair, self.counts[place], 0)
        types, followed = self.types[first], self.followed[first]
        # A token never followed by anything says nothing about the next one: leave that to the unigram.
        total = followed + types
        smoothed = (count + types * self.unigram[second]) / np.maximum(total, 1)
        return np.where(total > 0, smoothed, self.unigram[second])

    def score(self, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        """Mean nats per target of the unigram and of the bigram, weighted as a model's loss is.

        Args:
            inputs: int [..., context], the token before each target.
            targets: int [..., context].
            weights: float [..., context].
        """
        weights = np.asarray(weights, np.float64)
        total = weights.sum()
        unigram = -(weights * np.log(self.unigram[targets])).sum() / total
        bigram = -(weights * np.log(self.bigram(inputs, targets))).sum() / total
        return float(unigram), float(bigram)

    def sample(self, rng: np.random.Generator, count: int, start: int) -> np.ndarray:
        """`count` tokens drawn from the bigram one after another, beginning after `start`; int32 [count]."""
        ids = np.zeros(count, np.int32)
        cumulative = np.cumsum(self.unigram)
        previous = start
        for place in range(count):
            low, high = np.searchsorted(self.pairs, [previous * self.vocab_size, (previous + 1) * self.vocab_size])
            types, followed = int(self.types[previous]), int(self.followed[previous])
            # Drawing from a mixture: first which of the two models, then a token from it.
            if followed and rng.random() * (followed + types) < followed:
                steps = np.cumsum(self.counts[low:high])
                chosen = int(np.searchsorted(steps, rng.random() * steps[-1], side="right"))
                previous = int(self.pairs[low + chosen] - previous * self.vocab_size)
            else:
                drawn = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
                previous = min(int(drawn), self.vocab_size - 1)
            ids[place] = previous
        return ids


def _chunks(tokens: TokenArray | np.ndarray, extra: int):
    """(start, tokens[start : start + CHUNK_TOKENS + extra]) over all of them."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield start, np.asarray(tokens[start : start + CHUNK_TOKENS + extra], np.int64)


def _dense_pairs(tokens: TokenArray | np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.zeros(vocab_size * vocab_size, np.int64)
    for _, chunk in _chunks(tokens, 1):
        codes, counts = np.unique(chunk[:-1] * vocab_size + chunk[1:], return_counts=True)
        table[codes] += counts
    pairs = np.flatnonzero(table)
    return pairs, table[pairs]


def _sparse_pairs(tokens: TokenArray | np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for _, chunk in _chunks(tokens, 1):
        new, more = np.unique(chunk[:-1] * vocab_size + chunk[1:], return_counts=True)
        place = np.searchsorted(pairs, new)
        known = place < len(pairs)
        known[known] = pairs[place[known]] == new[known]
        counts[place[known]] += more[known]
        fresh = ~known
        pairs = np.insert(pairs, place[fresh], new[fresh])
        counts = np.insert(counts, place[fresh], more[fresh])
    return pairs, counts
