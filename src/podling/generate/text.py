"""Prompts in, streaming text out: the tokenizer around `decode`, stop strings, and what a caller wants to know."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from podling.errors import InputError, Problem, raise_if
from podling.generate.decode import Timing, Tokens, generate
from podling.generate.model import Model
from podling.generate.samples import undecodable
from podling.generate.settings import Settings
from podling.generate.stream import Detokenizer, StopStrings

ROWS = 32  # prompts decoded at once; more of them wait, so that the cache's memory is bounded


class Piece(NamedTuple):
    """Text that has just become certain."""

    row: int
    """Index of the prompt."""
    text: str


@dataclass(frozen=True)
class Completion:
    """What came of one prompt."""

    prompt: str
    text: str
    """Continuation, without the prompt and without the stop string."""
    prompt_tokens: int
    tokens: int
    """Tokens drawn for `text`, end-of-text not counted."""
    finish_reason: str
    """length, end_of_text, stop, or context_full."""


@dataclass(frozen=True)
class Generation:
    """All completions, and the speed they came at."""

    completions: list[Completion]
    tokens_per_s: float | None
    """Tokens decoded a second over all rows, compilation and prefill not counted; None when prefill drew them all."""
    timing: Timing


def generate_text(
    model: Model, prompts: Sequence[str], settings: Settings, *, dtype: Any = jnp.float32, tokens_per_call: int = 8
) -> Iterator[Piece | Generation]:
    """Continue each prompt, yielding text as it comes and a `Generation` last.

    The pieces of a row, joined, are its completion's text: characters come whole, and nothing of a stop string comes.

    Args:
        model: from `load_model`.
        prompts: an empty one starts a new text.
        settings: how tokens are drawn, and when to stop.
        dtype: compute precision.
        tokens_per_call: see `decode.generate`.

    Raises:
        InputError: on the first `next`: settings out of range, no prompts, or a prompt that the vocabulary cannot
            write or the context cannot hold (all of them named).
    """
    ids = _encode(model, prompts, settings)
    rows = [_Row(model, prompt, len(tokens), settings.stop) for prompt, tokens in zip(prompts, ids, strict=True)]
    timing = Timing()
    for start in range(0, len(rows), ROWS):
        group = rows[start : start + ROWS]
        events = generate(
            model.params,
            model.config.model,
            ids[start : start + ROWS],
            settings.for_row(start),
            end_id=model.tokenizer.eot_id,
            never_ids=undecodable(model.config.model, model.tokenizer),
            dtype=dtype,
            tokens_per_call=tokens_per_call,
            timing=timing,
        )
        for event in events:
            if text := group[event.row].push(event):
                yield Piece(start + event.row, text)
            if all(row.finish for row in group):  # stop strings are seen here only, not by the decoder
                break
    rate = timing.decoded / timing.decode_s if timing.decoded else None
    yield Generation([row.completion() for row in rows], rate, timing)


def _encode(model: Model, prompts: Sequence[str], settings: Settings) -> list[list[int]]:
    """Ids of every prompt; all that is wrong with any of them, and with the settings, is named at once."""
    problems = settings.problems()
    if not prompts:
        problems.append(Problem("--prompt", "no prompts"))
    context, encoded = model.config.model.context, []
    for number, prompt in enumerate(prompts, start=1):
        where = f"prompt {number}" if len(prompts) > 1 else "prompt"
        try:
            ids = model.tokenizer.encode(prompt)
        except InputError as error:
            problems += [Problem(where, problem.what, problem.fix) for problem in error.problems]
            continue
        if len(ids) > context:
            fix = "shorten the prompt: podling does not cut it silently"
            problems.append(Problem(where, f"is {len(ids)} tokens, and the model's context is {context}", fix))
        encoded.append(ids)
    raise_if(problems)
    return encoded


class _Row:
    """One prompt's way from ids to text."""

    def __init__(self, model: Model, prompt: str, prompt_tokens: int, stop: Sequence[str]):
        self._prompt, self._prompt_tokens = prompt, prompt_tokens
        self._stream = Detokenizer(model.tokenizer)
        self._stops = StopStrings(stop)
        self._text: list[str] = []
        self._tokens = 0
        self.finish = ""

    def push(self, new: Tokens) -> str:
        """Text these tokens make certain; one token at a time, so that a stop string ends the count where it stands."""
        if self.finish:
            return ""
        pieces = []
        for token in new.ids:
            self._tokens += 1
            pieces.append(self._stops.push(self._stream.push([token])))
            if self._stops.stopped:
                break
        if new.finish and not self._stops.stopped:
            pieces += [self._stops.push(self._stream.flush()), self._stops.flush()]
            self.finish = new.finish
        if self._stops.stopped:
            self.finish = "stop"
        text = "".join(pieces)
        self._text.append(text)
        return text

    def completion(self) -> Completion:
        return Completion(self._prompt, "".join(self._text), self._prompt_tokens, self._tokens, self.finish)
