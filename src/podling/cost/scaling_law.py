"""What loss a model of some size comes to after some tokens: a published law, and how far it has been from public runs.

loss = E + A / params^ALPHA + B / tokens^BETA, in nats per token of held-out text (Hoffmann et al. 2022,
arXiv:2203.15556), with the constants that Besiroglu et al. 2024 (arXiv:2404.10102) fitted to the same runs. Parameters
count with their embeddings. Where text is repeated, tokens that are seen again and parameters beyond what the text
calls for count for less (Muennighoff et al. 2023, arXiv:2305.16264, with the constants above in the place of theirs).
"""

import math
from dataclasses import dataclass

E, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
REPEATS, EXCESS = 15.387756, 5.309743
"""R*_D and R*_N of Muennighoff et al.: of very many repetitions, as much remains as this many times new text; and of
very many parameters, as much as this many times those that are best for the text."""

MOST_EPOCHS = 40
"""From about here on Muennighoff et al. saw nothing more come of repeating."""
LEAST_PARAMS = 20_000_000
LEAST_TOKENS = 200_000_000
VOCABULARIES = (30_000, 70_000)
"""Entries of the vocabularies that the law and the runs below had. With smaller ones a token is less text."""


@dataclass(frozen=True)
class Run:
    """A run whose loss is public."""

    name: str
    params: int
    tokens: float
    loss: float
    source: str


RUNS = (
    Run(
        "GPT-2 124M, FineWeb", 124_439_808, 10.0e9, 3.28, "karpathy/llm.c, discussion 481; KellerJordan/modded-nanogpt"
    ),
    Run("GPT-2 355M, FineWeb", 354_823_168, 31.5e9, 2.92, "karpathy/llm.c, run_gpt2_350M.sh; modded-nanogpt, track 2"),
    Run("GPT-2 124M, OpenWebText", 124_439_808, 295e9, 2.85, "karpathy/nanoGPT, README and train_gpt2.py"),
    Run("GPT-2 124M, OpenWebText", 124_439_808, 6.64e9, 3.09, "Google's GPT-2 notebook for JAX (loss of one batch)"),
    # Not GPT-2 but newer blocks, a vocabulary of 32,000 and small batches, all of which help: a lower bound.
    Run(
        "77M, OpenWebText", 77_500_000, 0.41e9, 3.73, "stanford-cs336/assignment1-basics-leaderboard, pull request 189"
    ),
)
FEW_TOKENS = 2e9
"""Of runs this short only the last is public, so that below the range is as wide as all runs say."""


def law(params: int, tokens: float, epochs: float | None = None) -> float:
    """Nats per token, by the law alone.

    Args:
        params: embeddings included.
        tokens: trained on, seen again or not.
        epochs: times that the data is seen; None when all of it is new.
    """
    return E + A / useful(params, tokens, epochs) ** ALPHA + B / worth(tokens, epochs) ** BETA


def worth(tokens: float, epochs: float | None) -> float:
    """New tokens that do as much as these."""
    if epochs is None or epochs <= 1:
        return tokens
    return tokens / epochs * _fading(epochs, REPEATS)


def useful(params: float, tokens: float, epochs: float | None) -> float:
    """Parameters that do as much as these, where text is repeated."""
    if epochs is None or epochs <= 1:
        return params
    best = (ALPHA * A / (BETA * B)) ** (1 / ALPHA) * (tokens / epochs) ** (BETA / ALPHA)  # for the text read once
    return min(params, best * _fading(params / best, EXCESS))


def _fading(times: float, limit: float) -> float:
    """`times` while it is little more than 1; never more than 1 + `limit`."""
    return 1 + limit * (1 - math.exp(-max(times - 1, 0) / limit))


def forecast(
    params: int, tokens: float, epochs: float | None, vocab_size: int
) -> tuple[tuple[float, float] | None, str]:
    """Where the loss on held-out English text should end, and in words why, or why nothing can be said.

    Args:
        params: embeddings included.
        tokens: trained on.
        epochs: times that the data is seen; None when that is not known.
        vocab_size: entries of the vocabulary.
    """
    none = _where_no_law_holds(params, tokens, epochs, vocab_size)
    if none:
        return None, none
    expected, (low, high) = law(params, tokens, epochs), misses(tokens)
    missed = f"from {-low:.2f} below to {high:.2f} above" if low else f"up to {high:.2f} above"
    words = (
        f"{expected:.2f} by the law of Hoffmann et al. 2022 as refitted by Besiroglu et al. 2024; public runs ended "
        f"{missed} it. For English text from the web; code comes out lower"
    )
    if epochs is not None and epochs > 1:
        words += (
            f". {epochs:.1f} epochs count as {worth(tokens, epochs) / tokens * epochs:.1f} (Muennighoff et al. 2023)"
        )
    return (expected + low, expected + high), words


def misses(tokens: float) -> tuple[float, float]:
    """How far under and over the law public runs have ended, rounded outward to 0.05 nats."""
    runs = [run for run in RUNS if tokens < FEW_TOKENS or run.tokens >= FEW_TOKENS]
    missed = [run.loss - law(run.params, run.tokens) for run in runs]
    return math.floor(min(*missed, 0) * 20) / 20, math.ceil(max(*missed, 0) * 20) / 20


def _where_no_law_holds(params: int, tokens: float, epochs: float | None, vocab_size: int) -> str:
    least, most = VOCABULARIES
    if not least <= vocab_size <= most:
        return f"no law holds for a vocabulary of {vocab_size:,}: the known ones are of {least:,} to {most:,} entries"
    if params < LEAST_PARAMS:
        return f"no law holds for models this small ({params / 1e6:.1f}M parameters; from {LEAST_PARAMS / 1e6:.0f}M on)"
    if tokens < LEAST_TOKENS:
        return f"no law holds for so few tokens ({tokens / 1e6:.0f}M; from {LEAST_TOKENS / 1e6:.0f}M on)"
    if epochs is not None and epochs > MOST_EPOCHS:
        return (
            f"no law holds for {epochs:,.0f} epochs of the same text: from about {MOST_EPOCHS} on, training longer "
            "has been seen to bring nothing (Muennighoff et al. 2023)"
        )
    return ""
