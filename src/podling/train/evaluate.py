"""Loss on fixed held-out windows."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from podling.config import ModelConfig
from podling.data.batches import EvalWindows
from podling.model.form import Form
from podling.model.gpt import forward
from podling.model.loss import cross_entropy
from podling.model.spec import Params
from podling.parallel.mesh import batch_sharding
from podling.train.progress.words import how_far
from podling.train.rows import place, rows_here

IN_FLIGHT = 4  # batches dispatched before a result is read: the device never waits, and memory stays bounded


@dataclass(frozen=True)
class EvalResult:
    """A sum and a count, and what people read from them."""

    nll_sum: float  # nats
    tokens: int
    bytes: int  # of the text these tokens stand for

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers; NaN when no text was scored, only ends of documents."""
        return self.nll_sum / math.log(2) / self.bytes if self.bytes else math.nan

    def record(self) -> dict[str, float | int]:
        """The fields of a metrics line."""
        return {
            "val_loss": self.loss,
            "val_perplexity": self.perplexity,
            "val_bits_per_byte": self.bits_per_byte,
            "val_tokens": self.tokens,
        }


class Evaluator:
    """Scores the same windows every time, with one compiled program."""

    def __init__(self, cfg: ModelConfig, windows: EvalWindows, mesh: Mesh, *, rows: int, dtype: Any, form: Form):
        """Args: `rows` is how many windows are scored at a time, over all devices."""
        self._windows = windows
        self._rows = rows
        self._sharding = batch_sharding(mesh, "batch", "sequence")
        self._mine = rows_here(self._sharding, rows, axis=0)
        # Emulated devices share the host's threads: programs that wait for one another's collectives can use them up.
        emulated = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._in_flight = 0 if emulated else IN_FLIGHT

        def batch_nll(params: Params, inputs: Array, targets: Array, weights: Array) -> Array:
            hidden = forward(params, inputs, cfg, dtype=dtype, form=form)
            return cross_entropy(params, hidden, targets, weights, cfg, chunk=form.loss_chunk)[0]

        self._batch_nll = jax.jit(batch_nll)

    def __call__(self, params: Params, tell: Callable[[str], None] | None = None) -> EvalResult:
        """Evaluate; the windows that fill up the last batch have weight zero.

        Each process scores the windows that its devices hold, and all come to know the sum.

        Args:
            params: float32, as stored.
            tell: given words on how far it is, now and then.
        """
        windows, rows = self._windows, self._rows
        arrays = (windows.inputs, windows.targets, windows.weights)
        total, began_s = len(windows.inputs), time.perf_counter()
        nll_sum = 0.0  # float64
        running: deque[jax.Array] = deque()
        for start in range(0, total, rows):
            running.append(self._batch_nll(params, *(self._put(array[start : start + rows]) for array in arrays)))
            if len(running) > self._in_flight:
                nll_sum += float(jax.device_get(running.popleft()))
                if tell:
                    done = start + rows - self._in_flight * rows
                    tell(how_far(done / total, time.perf_counter() - began_s))
        nll_sum += sum(float(nll) for nll in jax.device_get(list(running)))
        return EvalResult(nll_sum=nll_sum, tokens=int(np.count_nonzero(windows.weights)), bytes=windows.bytes)

    def _put(self, rows: np.ndarray) -> jax.Array:
        missing = self._rows - len(rows)
        whole = np.pad(rows, ((0, missing), (0, 0)))
        return place(whole[self._mine], self._sharding, self._rows, axis=0)
