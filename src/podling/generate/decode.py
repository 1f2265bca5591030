"""Tokens out of a model: one compiled prefill, then several tokens a compiled call, for a batch of prompts at once.

Everything here is ids; `generate.text` adds the tokenizer. B rows, P padded prompt length, S cache positions.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podling.config import ModelConfig
from podling.errors import Problem, raise_if
from podling.generate.sampling import Sampling, allowed
from podling.generate.settings import Settings
from podling.generate.steps import NO_MESH, Rules, decode, for_decoding, prefill
from podling.model.spec import Params, padded_vocab

BUCKET = 32  # the shortest prompt or cache that is compiled; see `bucket`


class Tokens(NamedTuple):
    """New tokens of one row; `finish` is set with the row's last ones."""

    row: int
    ids: list[int]
    finish: str | None
    """length (max_tokens reached), end_of_text, stop (one of `stop_ids`), or context_full."""


@dataclass
class Timing:
    """Where the time went, filled in while `generate` runs; rates derive from it."""

    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0
    """Tokens that `decode_s` produced: all but each row's first, which comes out of prefill."""


def generate(
    params: Params,
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    end_id: int,
    stop_ids: Sequence[int] = (),
    never_ids: Sequence[int] = (),
    dtype: Any = jnp.float32,
    tokens_per_call: int = 8,
    timing: Timing | None = None,
) -> Iterator[Tokens]:
    """Continue each prompt, yielding tokens as they come; ids that end a row are not yielded.

    A row's tokens depend on its prompt, the settings and seed + row alone: row r gives what its prompt alone gives
    with seed + r. Prompt and new tokens share the context; the last one drawn need not fit into it.

    Args:
        params: float32, of any placement, or what `for_decoding` made of them, which saves doing so in each call.
        cfg: the model.
        prompts: ids below `cfg.vocab_size`; an empty prompt starts from `end_id`.
        settings: `stop` strings are text, and not seen here.
        end_id: the tokenizer's end-of-text; it ends a row.
        stop_ids: further ids that end a row.
        never_ids: further ids that are never drawn; padding of the vocabulary never is.
        dtype: compute precision.
        tokens_per_call: tokens each compiled call draws; more of them cost less dispatch and stream less smoothly.
        timing: filled in as the tokens come.

    Raises:
        InputError: on the first `next`: settings out of range, no prompts, ids outside the vocabulary, or a prompt
            longer than the context.
    """
    timing = Timing() if timing is None else timing
    prompts = [list(prompt) or [end_id] for prompt in prompts]
    _check(cfg, prompts, settings, (end_id, *stop_ids, *never_ids))
    rows, longest = len(prompts), max(len(prompt) for prompt in prompts)
    with jax.set_mesh(NO_MESH):
        rules = _rules(cfg, prompts, settings, (end_id, *stop_ids), never_ids)
        args = (for_decoding(params, cfg, dtype), *_pad(prompts, bucket(longest, cfg.context)), rules)
    params, cache_length = args[0], bucket(longest + settings.max_tokens, cfg.context)
    state = _timed(timing, "prefill_s", prefill, args, cfg=cfg, cache_length=cache_length, dtype=dtype)
    ids, drawn, total = np.asarray(state.token)[None], np.ones((1, rows), bool), np.zeros(rows, int)
    while True:
        active, total = np.asarray(state.active), total + drawn.sum(axis=0)
        for row in np.flatnonzero(drawn.any(axis=0)):  # only rows that were active draw
            new = ids[drawn[:, row], row].tolist()
            all_drawn = bool(total[row] >= settings.max_tokens)
            finish = None if active[row] else _finish_reason(new[-1], end_id, stop_ids, all_drawn)
            yield Tokens(int(row), new[:-1] if finish in ("end_of_text", "stop") else new, finish)
        if not active.any():
            return
        # The state goes in as a donated argument and comes back: the cache is updated where it lies.
        args, first = (params, state, rules), bool(total.max() == 1)  # prefill drew one for each row
        state, ids, drawn = _timed(
            timing, "decode_s", decode, args, compile=first, cfg=cfg, steps=tokens_per_call, dtype=dtype
        )
        ids, drawn = np.asarray(ids), np.asarray(drawn)
        timing.decoded += int(drawn.sum())


def _rules(
    cfg: ModelConfig, prompts: list[list[int]], settings: Settings, ends: Sequence[int], never_ids: Sequence[int]
) -> Rules:
    rows, vocab = len(prompts), padded_vocab(cfg)
    limits = [min(settings.max_tokens, cfg.context - len(prompt) + 1) for prompt in prompts]
    return Rules(
        sampling=Sampling.of(settings, rows),
        seeds=jnp.asarray([settings.for_row(row).seed for row in range(rows)], jnp.uint32),
        limit=jnp.asarray(limits, jnp.int32),
        mask=allowed(vocab, cfg.vocab_size, tuple(never_ids)),
        ends=jnp.zeros((vocab,), bool).at[jnp.asarray(ends)].set(True),
    )


def _pad(prompts: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Prompts padded on the right [B, width], and their lengths [B]."""
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    return jnp.asarray(padded), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)


def _timed(
    timing: Timing, stage: str, function: Any, args: tuple[Any, ...], *, compile: bool = True, **static: Any
) -> Any:
    with jax.set_mesh(NO_MESH):
        start = time.perf_counter()
        if compile:  # the call below finds it compiled, so that only work is timed there
            function.lower(*args, **static).compile()
        compiled = time.perf_counter()
        result = jax.block_until_ready(function(*args, **static))
    timing.compile_s += compiled - start
    setattr(timing, stage, getattr(timing, stage) + time.perf_counter() - compiled)
    return result


def bucket(length: int, context: int) -> int:
    """Positions to compile for this many: 32, 48, 64, 96, 128, 192, ..., so that few programs serve any length."""
    size = BUCKET
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, context)


def _finish_reason(last: int, end_id: int, stop_ids: Sequence[int], all_drawn: bool) -> str:
    if last == end_id:
        return "end_of_text"
    if last in stop_ids:
        return "stop"
    return "length" if all_drawn else "context_full"


def _check(cfg: ModelConfig, prompts: list[list[int]], settings: Settings, special: Sequence[int]) -> None:
    problems = settings.problems()
    if not prompts:
        problems.append(Problem("--prompt", "no prompts"))
    for row, prompt in enumerate(prompts):
        where = f"prompt {row + 1}"
        if len(prompt) > cfg.context:
            problems.append(
                Problem(where, f"{len(prompt)} tokens, and the model's context is {cfg.context}", "shorten the prompt")
            )
        if wrong := [i for i in prompt if not 0 <= i < cfg.vocab_size]:
            problems.append(Problem(where, f"token id {wrong[0]} is outside the vocabulary of {cfg.vocab_size}"))
    if wrong := [i for i in special if not 0 <= i < cfg.vocab_size]:
        problems.append(Problem("stop ids", f"token id {wrong[0]} is outside the vocabulary of {cfg.vocab_size}"))
    raise_if(problems)
