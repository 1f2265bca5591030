"""Samples at the end of a run, and the share of them that Python can parse."""

import ast
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from podling.config import ModelConfig
from podling.data.tokenizer import Tokenizer
from podling.generate.decode import generate
from podling.generate.settings import Settings
from podling.model.spec import Params

SAMPLE_TOKENS = 200
MIN_STATEMENTS = 3
ROWS = 32  # decoded at once, so that many samples of a big model do not need many caches


def sample_text(
    params: Params,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    n: int,
    *,
    max_tokens: int = SAMPLE_TOKENS,
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> list[str]:
    """What the model writes when nothing is asked: `n` texts from end-of-text, at temperature 1, unfiltered.

    Args:
        params: float32, of any placement.
        cfg: the model.
        tokenizer: decodes the ids; an id it does not have is never drawn.
        n: how many.
        max_tokens: a text ends there, at end-of-text, or where the context is full.
        seed: sample i depends on seed + i alone, whatever `n` is.
        dtype: compute precision.
    """
    texts: list[str] = []
    for start in range(0, n, ROWS):
        rows = min(ROWS, n - start)
        settings = Settings(max_tokens=max_tokens, seed=seed).for_row(start)
        ids: list[list[int]] = [[] for _ in range(rows)]
        for new in generate(
            params,
            cfg,
            [[]] * rows,
            settings,
            end_id=tokenizer.eot_id,
            never_ids=undecodable(cfg, tokenizer),
            dtype=dtype,
            tokens_per_call=32,
        ):
            ids[new.row] += new.ids
        texts += [tokenizer.decode(row) for row in ids]
    return texts


def undecodable(cfg: ModelConfig, tokenizer: Tokenizer) -> range:
    """Ids that a model has and its tokenizer does not, as in imported models whose vocabulary was padded."""
    return range(tokenizer.vocab_size, cfg.vocab_size)


def python_parse_share(texts: Sequence[str]) -> tuple[float, int]:
    """How many texts are Python: the share and the count.

    A text is cut at its last newline, since its last line is seldom whole; it counts when it parses and has at least
    three statements, nested ones included (an empty text parses too).
    """
    count = sum(_is_python(text[: text.rfind("\n") + 1]) for text in texts)
    return (count / len(texts) if texts else 0.0), count


def _is_python(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning: parsed all the same
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # NUL bytes, too deep for the parser
            return False
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) >= MIN_STATEMENTS
