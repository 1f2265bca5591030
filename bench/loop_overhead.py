"""What podling's loop costs beside its bare step: metrics, progress, the loader, and asynchronous checkpoints.

    python bench/loop_overhead.py                                     the default job
    python bench/loop_overhead.py --shape char --steps 100
    python bench/loop_overhead.py --shape 124m --steps 8 --rounds 2 --checkpoint-every 100

Ways to run the same compiled step, interleaved, each going on from the state that the one before it left:

- bare: one batch that is on the device already, the step called in a row, and the last loss read;
- loop: what `podling train` does between two evaluations: batches read from shards by the loader's thread and put on
  the device, metrics read one step late and written to metrics.jsonl and TensorBoard, a live view drawn on a terminal;
- save: the loop with one asynchronous checkpoint of the whole state, begun after the first step and waited for at the
  end. What it takes longer than the loop, spread over `--checkpoint-every` steps, is what checkpoints cost a run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pty
import random
import statistics
import string
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from podling.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from podling.run.folder import RunFolder
from podling.run.metrics import MetricsLog
from podling.train.loop import Run
from podling.train.progress import LiveReporter, QuietReporter
from podling.train.session import Session
from podling.train.signals import AgreedStop, StopRequest
from podling.train.start import prepare_data
from podling.train.together import Together

MOST = 0.02
"""Of a step's time, that the loop and checkpoints may cost."""
SHAPES = {  # layers, heads, embed, context, rows, vocabulary (0: of the text)
    "char": (4, 4, 128, 64, 12, 0),
    "default": (4, 4, 192, 128, 16, 0),
    "mini": (6, 6, 384, 256, 64, 0),
    "124m": (12, 12, 768, 64, 4, 50257),
}


class Job:
    """One run, stretch after stretch.

    Args:
        session: whose mesh is the ambient one.
        folder: of the run.
        screen: the terminal that the live view is drawn on.
    """

    def __init__(self, session: Session, folder: Path, screen: Any):
        config = session.config
        self.session, self.reporter = session, LiveReporter(config.train.steps, stream=screen, width=100)
        self.folder = RunFolder.open(folder, config, {})
        self.run = Run(session, self.folder, self.reporter, time.perf_counter(), Together())
        self.run.log = MetricsLog(self.folder.paths, config, restored_step=0, say=self.reporter.say)
        self.stop = AgreedStop(StopRequest(), Together())
        session.compile_step()
        self.reporter.begin(config.train.steps, 0)
        self.batches = session.batches.iterate(0)
        self.state = self.run.first_step(session.init_state(), 0, self.batches)
        self.done = 1
        self.placed = session.put(session.batches.batch(0))

    def bare(self, steps: int) -> float:
        """Seconds a step."""
        metrics: Any = None
        began_s = time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.session.train_step(self.state, self.placed)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - began_s) / steps

    def loop(self, steps: int, *, save: bool = False) -> float:
        """Seconds a step."""
        self.run.meter.resume()
        began_s = time.perf_counter()
        if save:
            self.go_on(1)
            self.run.between.save(self.state, self.done)
        self.go_on(steps - save)
        if save:
            self.run.between.wait_saved(self.done)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began_s) / steps

    def go_on(self, steps: int) -> None:
        """So many steps of the loop that trains."""
        self.run.total_steps = self.done + steps
        self.state = self.run.go_on(self.state, self.done, self.batches, self.stop)
        self.done += steps

    def close(self) -> None:
        """Stop threads and close files."""
        self.batches.close()
        self.reporter.close()
        self.run.between.checkpoints.close()
        if self.run.log is not None:
            self.run.log.close()
        self.folder.close()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, terminal() as screen:
        session = open_session(args.shape, Path(folder))
        with jax.set_mesh(session.mesh), contextlib.closing(Job(session, Path(folder) / "run", screen)) as job:
            ways: dict[str, Callable[[], float]] = {
                "bare": lambda: job.bare(args.steps),
                "loop": lambda: job.loop(args.steps),
            }
            if args.checkpoint_every:
                ways["save"] = lambda: job.loop(args.steps, save=True)
            took: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, way in ways.items():
                    took[name].append(way())
        wait_share = job.run.meter.data_wait_share or 0.0
    report(args, took, wait_share)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="default")
    parser.add_argument("--steps", type=int, default=40, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0 leaves the checkpoint out")
    parser.add_argument("--folder", help="where the run is written (a temporary folder in it)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def open_session(name: str, folder: Path) -> Session:
    """As `podling train` opens it, on made-up text."""
    layers, heads, embed, context, rows, vocab = SHAPES[name]
    text = folder / "text.txt"
    text.write_text(words(300_000))
    tokenizer = "char" if name == "char" else "bpe"
    config = Config(
        model=ModelConfig(layers=layers, heads=heads, embed=embed, mlp=4 * embed, context=context),
        data=DataConfig(paths=(str(text),), tokenizer=tokenizer, cache=str(folder / "cache")),
        train=TrainConfig(steps=10**6, batch_tokens=rows * context, eval_every=0),
        run=RunConfig(checkpoint_every=0),
    )
    config, prepared = prepare_data(config, QuietReporter())
    if vocab:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab))
    return Session.open(config, prepared, QuietReporter())


@contextlib.contextmanager
def terminal() -> Iterator[Any]:
    """A terminal that somebody reads."""
    reading, writing = pty.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(reading, 65536):
                pass

    threading.Thread(target=read, daemon=True).start()
    with os.fdopen(writing, "w") as screen:
        yield screen


def words(count: int) -> str:
    """Lines of made-up words of 65 characters."""
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits[:9]
    known = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(3000)]
    return "\n".join(" ".join(draw.choices(known, k=10)) for _ in range(count // 10))


def report(args: argparse.Namespace, took: dict[str, list[float]], wait_share: float) -> None:
    """The table: medians over the rounds, and how far apart these are."""
    median = {name: statistics.median(each) for name, each in took.items()}
    rows = {"loop": median["loop"] / median["bare"] - 1, "data wait": wait_share}
    if "save" in took:
        extra_s = (median["save"] - median["loop"]) * args.steps
        rows[f"a checkpoint every {args.checkpoint_every} steps"] = extra_s / (args.checkpoint_every * median["loop"])
    if args.json:
        print(json.dumps({"shape": args.shape, "step_s": took, "costs": rows}))
        return
    for name, each in took.items():
        print(f"{name:<6} {1e3 * median[name]:9.2f} ms/step  ({1e3 * min(each):.2f} to {1e3 * max(each):.2f})")
    for name, cost in rows.items():
        most = MOST / 2 if name == "data wait" else MOST
        print(f"{name}: {cost:+.2%} of a step, at most {most:.0%}: {'met' if cost <= most else 'missed'}")


if __name__ == "__main__":
    main()
