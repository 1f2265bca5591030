"""What every worker of bench/cpu_training.py agrees on: the shape of the work, and the talk with the harness.

The harness starts a worker with the path of a file that `Work.save` wrote. The worker prepares, waits for a line, warms
up and says one line of JSON, `{"first_loss": ..., "warm_step_s": ...}`; from then on each line it reads is a number of
steps, answered by `{"step_s": ..., "loss": ...}`.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Work:
    """One row of the table: model, batch and optimizer, the same for everyone."""

    name: str
    layers: int
    heads: int
    embed: int
    vocab_size: int
    rows: int
    context: int
    warmup_steps: int
    """Steps before the clock, two at least: the first compiles or allocates, the last says how long a sample is."""
    target: float
    """Tokens/s that podling is to reach, as a multiple of the best peer's."""
    most_memory: float | None = None
    """Times the best peer's peak while stepping, at most; None where no limit is set."""
    threads: int = 0
    tokens: str = ""
    """File of int32 [batches, rows, context + 1]."""
    clip: float = 1.0
    """Global gradient norm; 0 for none. llm.c has no clipping."""
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    @property
    def step_tokens(self) -> int:
        return self.rows * self.context

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> "Work":
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def keep_stdout() -> Callable[[dict], None]:
    """Whatever prints goes to stderr from here on; the function returned says one object to the harness."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return say


def serve(work: Work, run: Callable[[int], float], say: Callable[[dict], None], **about: object) -> None:
    """Warm up when asked to, then take as many steps as each line says, until there are no more lines.

    Args:
        work: what is done.
        run: takes that many steps, waits until they are done, and returns the last one's loss.
        say: of `keep_stdout`.
        about: said with the first answer.
    """
    sys.stdin.readline()  # one at a time: threads of several that wait for one another would spin for minutes
    first_loss = run(1)
    for _ in range(work.warmup_steps - 1):
        began_s = time.perf_counter()
        run(1)
        about["warm_step_s"] = time.perf_counter() - began_s
    say({"first_loss": first_loss, **about})
    for line in sys.stdin:
        count = int(line)
        began_s = time.perf_counter()
        loss = run(count)
        say({"step_s": (time.perf_counter() - began_s) / count, "loss": loss})
