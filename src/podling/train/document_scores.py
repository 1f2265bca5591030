"""Every document of some text with its loss and the norm of its gradient, over all devices and in bounded memory."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

from podling.config import Config
from podling.cost.step_bytes import row_bytes
from podling.data.documents import DocumentPlace, document_tokens, list_documents
from podling.data.shards import Prepared, SplitName
from podling.model.form import Form
from podling.model.spec import Params, param_count
from podling.train.batch_plan import device_memory_bytes
from podling.train.per_example import score_windows
from podling.train.progress.words import how_far

MOST_WINDOWS = 16  # in one call, on each device
WORDS_TOKENS = 64  # decoded for the first words


@dataclass
class DocumentScore:
    """What a document came to; `nll_sum` and `grad_norm` grow while it is being read."""

    name: str
    source: str
    index: int
    first_words: str
    tokens: int  # scored: its own and the end-of-text that closes it
    bytes: int  # of its text
    nll_sum: float = 0.0  # nats
    grad_norm: float = 0.0  # of the summed loss

    def record(self) -> dict[str, Any]:
        """Sums divided, once: nats per token, bits per byte (NaN without text), norm of the mean loss's gradient."""
        return {
            "document": self.name,
            "path": self.source,
            "number": self.index,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats_per_token": self.nll_sum / self.tokens,
            "bits_per_byte": self.nll_sum / math.log(2) / self.bytes if self.bytes else math.nan,
            "grad_norm": self.grad_norm / self.tokens,
            "text": self.first_words,
        }


class Window(NamedTuple):
    """Up to T tokens of a document, padded to T with weight 0."""

    score: DocumentScore | None
    arrays: tuple[Any, Any, Any, Any]
    """Whether it begins the document, inputs [T], targets [T], weights [T]: what `score_windows` takes."""

    @property
    def tokens(self) -> int:
        """How many of them are scored."""
        return int(self.arrays[3].sum())


def score_documents(
    params: Params,
    config: Config,
    prepared: Prepared,
    splits: Sequence[SplitName],
    *,
    devices: Sequence[Any],
    dtype: Any,
    tell: Callable[[str], None] | None = None,
) -> list[DocumentScore]:
    """Score every document from its first token, which follows an end-of-text, to the end-of-text that closes it.

    A document longer than the context is read in windows, as training reads it; loss and gradient are summed over them.

    Args:
        params: float32, whole; each device gets a copy.
        config: of the run.
        prepared: the text.
        splits: which of it.
        devices: documents are dealt to them.
        dtype: compute precision.
        tell: given words on how far it is, now and then.
    """
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    at_once = windows_at_once(config, jnp.dtype(dtype).itemsize, devices[0].platform, device_memory_bytes(devices))
    step = _compiled(config, mesh, dtype)
    scores: list[DocumentScore] = []
    queues = [
        _windows(prepared, documents, config.model.context, scores)
        for documents in _deal(list_documents(prepared, splits), len(devices))
    ]
    whole, split = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data"))
    params = jax.device_put(params, whole)
    running = jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), x.dtype, device=split), params)
    padding = _padding(config.model.context)
    told = _Progress(sum(len(prepared.tokens(name)) for name in splits), tell)
    in_flight: deque[tuple[list[Window], Any]] = deque()
    while windows := _next_call(queues, at_once, padding):
        arrays = [np.stack(field) for field in zip(*(window.arrays for window in windows), strict=True)]
        running, *results = step(params, running, *jax.device_put(arrays, split))
        in_flight.append((windows, results))
        # One call is read while the next one runs: the device never waits, and no more than two are held.
        if len(in_flight) > 1:
            told.add(_take(*in_flight.popleft()))
    for call in in_flight:
        _take(*call)
    return scores


class _Progress:
    """Says how far it is; the first call compiles, and tells nothing of the speed."""

    def __init__(self, total: int, tell: Callable[[str], None] | None):
        self.left, self.done, self.tell, self.began_s = total, 0, tell, 0.0

    def add(self, tokens: int) -> None:
        """Count tokens that have been scored."""
        if self.began_s and self.tell:
            self.done += tokens
            self.tell(how_far(min(self.done / self.left, 1.0), time.perf_counter() - self.began_s))
        elif not self.began_s:
            self.left, self.began_s = max(self.left - tokens, 1), time.perf_counter()


def windows_at_once(config: Config, itemsize: int, platform: str, device_bytes: int) -> int:
    """How many windows' gradients and activations fit a quarter of a device, within 1 and MOST_WINDOWS; 1 on a CPU.

    A CPU has no units that one window leaves idle, and each further gradient falls out of its cache: 19 ms a window of
    the default model one at a time, 45 ms by fours, 48 ms by sixteens (two cores).
    """
    if platform == "cpu":
        return 1
    window_bytes = 8 * param_count(config.model) + row_bytes(config, itemsize)
    return max(1, min(MOST_WINDOWS, device_bytes // 4 // window_bytes))


def _compiled(config: Config, mesh: jax.sharding.Mesh, dtype: Any) -> Any:
    """`score_windows` on every device, each with its own documents: no device waits for another."""

    def on_device(params: Any, running: Any, *windows: Any) -> Any:
        mine = lax.pcast(params, "data", to="varying")  # else gradients would be summed over the devices
        running = jax.tree.map(lambda x: x[0], running)
        score = partial(score_windows, cfg=config.model, dtype=dtype, loss_chunk=Form.of(config.train).loss_chunk)
        running, losses, norms = score(mine, running, *windows)
        return jax.tree.map(lambda x: x[None], running), losses, norms

    cut = P("data")
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), *(cut,) * 5), out_specs=cut)
    return jax.jit(mapped, donate_argnums=1)


def _deal(documents: list[DocumentPlace], hands: int) -> list[list[DocumentPlace]]:
    """The documents in as many piles of about equal length: a document's windows are read one after the other."""
    lengths = [0] * hands
    piles: list[list[DocumentPlace]] = [[] for _ in range(hands)]
    for document in sorted(documents, key=lambda document: -document.tokens):
        least = lengths.index(min(lengths))
        piles[least].append(document)
        lengths[least] += document.tokens
    return piles


def _windows(
    prepared: Prepared, documents: list[DocumentPlace], context: int, scores: list[DocumentScore]
) -> Iterator[Window]:
    """The windows of these documents in order; each document is added to `scores` when its turn comes."""
    tokenizer = prepared.tokenizer
    bytes_of = tokenizer.token_bytes()
    lengths = None if bytes_of is None else np.array(bytes_of, np.int64)
    for document in documents:
        tokens = document_tokens(prepared, document)
        score = DocumentScore(
            name=prepared.document_name(document.source, document.index),
            source=prepared.manifest["sources"][document.source]["name"],
            index=document.index,
            first_words=_first_words(prepared, tokens),
            tokens=len(tokens),
            bytes=len(tokenizer.decode_bytes(tokens.tolist())) if lengths is None else int(lengths[tokens].sum()),
        )
        scores.append(score)
        stream = np.concatenate([np.array([tokenizer.eot_id], np.int32), tokens])
        for start in range(0, len(tokens), context):
            part = stream[start : start + context + 1]
            missing = context + 1 - len(part)
            weights = np.pad(np.ones(len(part) - 1, np.float32), (0, missing))
            part = np.pad(part, (0, missing), constant_values=tokenizer.eot_id)
            yield Window(score, (start == 0, part[:-1], part[1:], weights))


def _first_words(prepared: Prepared, tokens: np.ndarray) -> str:
    """On one line; ends with "…" where the text goes on. A character that was cut in the middle is left out."""
    text = prepared.tokenizer.decode(tokens[:WORDS_TOKENS].tolist())
    goes_on = len(tokens) > WORDS_TOKENS + 1  # the last one is the end-of-text
    return " ".join(text.rstrip("\ufffd").split()) + "…" if goes_on else " ".join(text.split())


def _padding(context: int) -> Window:
    """A window that adds nothing to anything, for a device that has no more documents."""
    nothing = np.zeros(context, np.int32)
    return Window(None, (False, nothing, nothing, np.zeros(context, np.float32)))


def _next_call(queues: list[Iterator[Window]], at_once: int, padding: Window) -> list[Window]:
    """The next windows of every device, `at_once` for each; empty when all are through."""
    rows = [list(islice(queue, at_once)) for queue in queues]
    return [w for row in rows for w in row + [padding] * (at_once - len(row))] if any(rows) else []


def _take(windows: list[Window], results: Any) -> int:
    """Add a call's results to its documents; returns the tokens scored."""
    losses, norms = jax.device_get(results)
    for window, loss, norm in zip(windows, losses, norms, strict=True):
        if window.score is not None:
            window.score.nll_sum += float(loss)  # float64
            window.score.grad_norm = float(norm)
    return sum(window.tokens for window in windows)
