"""Batches as a pure function of (seed, step, data), and the fixed windows that evaluation uses."""

import hashlib
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from podling.data.shards import Prepared, SplitName
from podling.errors import InputError, Problem

PREFETCH_BATCHES = 4


@dataclass(frozen=True)
class Batch:
    """One optimizer step's tokens: int32 [micro_steps, rows, context], weights float32 of the same shape.

    Of the rows of a micro-batch it holds those that this process was asked to load, in their order.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class EvalWindows:
    """Fixed held-out windows: inputs and targets int32 [windows, context]; weights float32, 0 on padding.

    `bytes` is the text (UTF-8) that the scored targets stand for; 0 when the tokenizer cannot tell.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    bytes: int


class Batches:
    """Shuffled training windows: each once an epoch, in an order of its own.

    Window k covers tokens k·context to (k+1)·context, its targets one further. The text's last tokens seldom fill a
    window: the last one is moved back to end with the text, so that nothing is dropped and some tokens are seen twice.

    Args:
        prepared: the data.
        context: tokens in a row.
        rows: rows in a micro-batch, over all devices.
        micro_steps: micro-batches in a step.
        seed: decides the order.
        mine: numbers of the micro-batch's rows that this process loads; all of them when not given.

    Raises:
        InputError: the training text is shorter than one window and the token after it.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        context: int,
        rows: int,
        micro_steps: int,
        seed: int,
        mine: Sequence[int] | None = None,
    ):
        # Grain imports JAX and takes a second: only training pays for that.
        import grain

        self._prepared, self._tokens = prepared, prepared.tokens("train")
        self.context, self.rows, self.micro_steps = context, rows, micro_steps
        self.mine = np.arange(rows) if mine is None else np.asarray(mine)
        check_length(prepared, "train", context)
        self.windows = -(-(len(self._tokens) - 1) // context)
        order = grain.MapDataset.range(self.windows).seed(seed).shuffle().repeat()
        self._order = order.batch(rows * micro_steps)

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps in which every window is seen once; an epoch may end within a step."""
        return self.windows / (self.rows * self.micro_steps)

    def starts(self, step: int) -> np.ndarray:
        """First token of each row of a step, int64 [micro_steps · rows]."""
        return np.minimum(np.asarray(self._order[step], np.int64) * self.context, len(self._tokens) - 1 - self.context)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0: the same for the same seed, step and data, whatever came before.

        Which windows it holds is known to every process; only this process's rows are read from the disk.
        """
        return self._batch(step, self.mine)

    def whole(self, step: int) -> Batch:
        """The same with all rows, whichever this process loads otherwise."""
        return self._batch(step, np.arange(self.rows))

    def _batch(self, step: int, rows: np.ndarray) -> Batch:
        starts = self.starts(step).reshape(self.micro_steps, self.rows)[:, rows]
        read = self._read(starts.ravel())
        shape = (*starts.shape, self.context)
        inputs, targets = read[:, :-1].reshape(shape), read[:, 1:].reshape(shape)
        return Batch(np.ascontiguousarray(inputs), np.ascontiguousarray(targets), np.ones(shape, np.float32))

    def digest(self, step: int) -> str:
        """SHA-256 of all tokens of a step's rows, in order: the same however they are cut and spread.

        It reads the whole batch; made once a session, and once a checkpoint.
        """
        return hashlib.sha256(self._read(self.starts(step)).astype("<i4").tobytes()).hexdigest()

    def _read(self, starts: np.ndarray) -> np.ndarray:
        """Rows of a window and the token after it, int32 [starts, context + 1]."""
        return np.stack([self._tokens[start : start + self.context + 1] for start in starts])

    def documents(self, step: int) -> list[str]:
        """The documents a step's rows begin in, without repeats, for messages."""
        return list(dict.fromkeys(self._prepared.document_at("train", int(start)) for start in self.starts(step)))

    def iterate(self, start_step: int = 0) -> Generator[Batch, None, None]:
        """Batches from `start_step` on, without end, made ahead by a thread; closing the iterator stops the thread.

        Raises:
            InputError, OSError: whatever making a batch raised, when its turn comes.
        """
        made: queue.Queue[Batch | BaseException] = queue.Queue(PREFETCH_BATCHES)
        stopped = threading.Event()

        def put(item: Batch | BaseException) -> None:
            while not stopped.is_set():
                try:
                    made.put(item, timeout=0.1)
                    return
                except queue.Full:
                    continue

        def work() -> None:
            step = start_step
            try:
                while not stopped.is_set():
                    put(self.batch(step))
                    step += 1
            except BaseException as error:
                put(error)

        worker = threading.Thread(target=work, name="podling-batches", daemon=True)
        worker.start()
        try:
            while True:
                item = made.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            worker.join()

    @cached_property
    def note(self) -> str:
        """How the end of the text is handled, for the log; empty when it fits."""
        short = self.windows * self.context - (len(self._tokens) - 1)
        return f"the last of {self.windows:,} windows overlaps the one before it by {short} tokens" if short else ""


def heldout_windows(prepared: Prepared, context: int, max_tokens: int, split: SplitName = "heldout") -> EvalWindows:
    """Windows over the held-out text (or the other split), the same every time.

    All of it when it has at most `max_tokens` (or that is 0), else windows of a whole grid, evenly spaced. Every target
    is scored once at most. A last window that the text does not fill is padded with weight 0.

    Raises:
        InputError: the held-out text is shorter than two tokens.
    """
    tokens = prepared.tokens(split)
    check_length(prepared, split, 1)
    windows = -(-(len(tokens) - 1) // context)
    chosen = np.arange(windows)
    if max_tokens and windows * context > max_tokens:
        count = max(1, max_tokens // context)
        chosen = (np.arange(count) * windows) // count
    inputs = np.full((len(chosen), context), prepared.tokenizer.eot_id, np.int32)
    targets = inputs.copy()
    weights = np.zeros((len(chosen), context), np.float32)
    for row, window in enumerate(chosen):
        part = tokens[int(window) * context : int(window) * context + context + 1]
        inputs[row, : len(part) - 1], targets[row, : len(part) - 1] = part[:-1], part[1:]
        weights[row, : len(part) - 1] = 1
    return EvalWindows(inputs, targets, weights, _text_bytes(prepared, targets[weights > 0], split))


def _text_bytes(prepared: Prepared, targets: np.ndarray, split: SplitName) -> int:
    """Bytes of text the targets stand for: summed token by token, or, when tokens have no fixed bytes, pro rata."""
    lengths = prepared.tokenizer.token_bytes()
    if lengths is not None:
        return int(np.asarray(lengths, np.int64)[targets].sum())
    whole = prepared.manifest["splits"][split]
    return round(whole["text_bytes"] * targets.size / whole["tokens"])


def check_length(prepared: Prepared, split: SplitName, context: int) -> None:
    """Refuse a split that does not fill one window.

    Raises:
        InputError: with how much there is.
    """
    tokens = len(prepared.tokens(split))
    if tokens < context + 1:
        kind = "training" if split == "train" else "held-out"
        what = f"the {kind} text has {tokens:,} tokens, fewer than one context of {context:,} and the token after it"
        fix = (
            "give more text, or a shorter --context"
            if split == "train"
            else "give more text, or a larger --data.holdout"
        )
        raise InputError(Problem(str(prepared.path), what, fix))
