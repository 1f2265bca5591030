"""What a unigram and a bigram model of the same tokens reach: the bar a GPT has to clear."""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np

from podling.data.ngram import NgramBaseline
from podling.files import atomic_write, read_json
from podling.generate.samples import SAMPLE_TOKENS, python_parse_share
from podling.run.folder import RunFolder
from podling.train.progress import Reporter
from podling.train.session import Session


@dataclass(frozen=True)
class Baseline:
    """Nats per token on the run's own held-out windows; share of the bigram's samples that parse as Python."""

    unigram_loss: float
    bigram_loss: float
    bigram_parse_share: float | None  # None when the text is not Python


def baselines(session: Session, folder: RunFolder, reporter: Reporter) -> Baseline:
    """Count all training tokens, score the held-out windows, and keep the result in the run folder."""
    path = folder.path / "baselines.json"
    if path.exists():
        return Baseline(**read_json(path))
    prepared, config = session.prepared, session.config
    with reporter.status("counting unigrams and bigrams", None):
        ngram = NgramBaseline.fit(prepared.tokens("train"), config.model.vocab_size)
        unigram, bigram = ngram.score(session.windows.inputs, session.windows.targets, session.windows.weights)
        share = None
        if prepared.kind == "python":
            rng, start = np.random.default_rng(config.train.seed), prepared.tokenizer.eot_id
            ids = [ngram.sample(rng, SAMPLE_TOKENS, start) for _ in range(config.train.samples)]
            share, _ = python_parse_share([prepared.tokenizer.decode(sample.tolist()) for sample in ids])
    found = Baseline(unigram_loss=unigram, bigram_loss=bigram, bigram_parse_share=share)
    atomic_write(path, json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    return found
