"""The loader: shards of made-up tokens, and how fast batches come out of them."""

import time
from contextlib import closing
from pathlib import Path

import numpy as np

from podling.data.batches import Batches
from podling.data.shards import Prepared, ShardWriter, fingerprint, token_dtype
from podling.data.vocabulary import bytes_tokenizer
from podling.train.setup import Setup

LEAST_TOKENS = 2**22
"""Of a made-up shard: 8 MB, more than a processor keeps near."""


def made_up(folder: Path, setup: Setup, seed: int = 0) -> Prepared:
    """Prepared data whose tokens are drawn at random: which ones they are changes no speed.

    Args:
        folder: empty; its shard is written there.
        setup: gives the vocabulary, and the tokens of a step: there are a few steps' at least.
        seed: of the tokens.
    """
    vocab_size = setup.config.model.vocab_size
    tokens = max(LEAST_TOKENS, 8 * setup.plan.tokens) + 1
    writer = ShardWriter(folder, "train-00000", vocab_size, eot_id=0)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, tokens, np.int64)
    writer.add([(ids, 0, 0, False, tokens)])
    splits = {"train": {"shards": [writer.finish()]}, "heldout": {"shards": []}}
    tokenizer = bytes_tokenizer()  # never asked: nothing here is text
    manifest = {
        "fingerprint": fingerprint(tokenizer, splits),
        "kind": "text",
        "dtype": token_dtype(vocab_size).str,
        "splits": splits,
    }
    return Prepared(folder, manifest, tokenizer)


def batches_of(prepared: Prepared, setup: Setup) -> Batches:
    """The batches that training would take, of all rows."""
    plan = setup.plan
    return Batches(
        prepared,
        context=plan.context,
        rows=plan.micro_batch,
        micro_steps=plan.micro_steps,
        seed=setup.config.train.seed,
    )


def loader_tokens_per_s(batches: Batches, seconds: float) -> float:
    """Tokens/s of batches made ahead by the loader's thread, while nothing else wants the processor."""
    with closing(batches.iterate()) as coming:
        next(coming)
        began_s, tokens = time.perf_counter(), 0
        while not tokens or time.perf_counter() < began_s + seconds:
            tokens += next(coming).inputs.size
        return tokens / (time.perf_counter() - began_s)
