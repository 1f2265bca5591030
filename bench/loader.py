"""Whether the loader keeps up: tokens a second out of shards, and the share of a step spent waiting for a batch.

    python bench/loader.py
    python bench/loader.py --tokens-per-s 1e6 --batch-tokens 524288 --gb 2

Made-up shards of 16-bit tokens are read in podling's shuffled order: once with none of them in the system's page cache
(cold: each window comes from the disk) and once from memory (warm). Then a consumer takes a batch from the loader's
thread, as training does, and works on it for as long as a step at `--tokens-per-s` lasts.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from podling.data.batches import Batches
from podling.data.shards import TokenArray

MOST_WAIT = 0.01
"""Of a step's time."""
SHARD_TOKENS = 50_000_000


class Shards:
    """As much of prepared data as batches are made of."""

    def __init__(self, folder: Path, total_bytes: float):
        draw = np.random.default_rng(0)
        self.path, count = folder, max(1, round(total_bytes / (2 * SHARD_TOKENS)))
        self.files = [folder / f"{number:03d}.bin" for number in range(count)]
        for file in self.files:
            with open(file, "wb") as out:
                out.write(draw.integers(0, 50257, SHARD_TOKENS, dtype=np.uint16).tobytes())
                out.flush()
                os.fsync(out.fileno())

    def tokens(self, split: str) -> TokenArray:
        """All of them."""
        return TokenArray([np.memmap(file, "<u2", "r") for file in self.files])

    def forget(self) -> None:
        """Out of the page cache."""
        for file in self.files:
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-s", type=float, default=1e6, help="what the consumer needs")
    parser.add_argument("--batch-tokens", type=int, default=524288)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--gb", type=float, default=0.5, help="of shards")
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--folder", help="on the disk that is asked about; a temporary folder is made in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        shards = Shards(Path(folder), args.gb * 1e9)
        found = {}
        for name in ("cold", "warm"):
            batches = Batches(
                shards,  # pyright: ignore[reportArgumentType]
                context=args.context,
                rows=args.batch_tokens // args.context,
                micro_steps=1,
                seed=0,
            )
            if name == "cold":
                shards.forget()
            alone = throughput(batches, args.seconds / 4 if name == "cold" else args.seconds)
            if name == "cold":
                shards.forget()
            wait = wait_share(batches, args.tokens_per_s, args.seconds)
            found[name] = {"tokens_per_s": alone, "wait_share": wait}
    if args.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        wait = figures["wait_share"]
        print(
            f"{name}: {figures['tokens_per_s'] / 1e6:,.1f}M tokens/s; at {args.tokens_per_s / 1e6:g}M tokens/s "
            f"{wait:.2%} of a step is spent waiting for data, at most {MOST_WAIT:.0%}: "
            f"{'met' if wait <= MOST_WAIT else 'missed'}"
        )


def throughput(batches: Batches, seconds: float) -> float:
    """Tokens a second of one thread that only makes batches; at most one epoch, so that cold stays cold."""
    began_s, made = time.perf_counter(), 0
    while (took_s := time.perf_counter() - began_s) < seconds and made < batches.steps_per_epoch - 1:
        batches.batch(made)
        made += 1
    return made * batches.rows * batches.context / (took_s if made else 1)


def wait_share(batches: Batches, tokens_per_s: float, seconds: float) -> float:
    """Share of steps of that speed that is spent waiting for the loader's thread."""
    step_s, waited_s, total_s = batches.rows * batches.context / tokens_per_s, 0.0, 0.0
    with closing(batches.iterate()) as coming:
        next(coming)  # what comes before the first step is no wait between two
        while total_s < seconds:
            began_s = time.perf_counter()
            time.sleep(step_s)
            asked_s = time.perf_counter()
            next(coming)
            now_s = time.perf_counter()
            waited_s, total_s = waited_s + now_s - asked_s, total_s + now_s - began_s
    return waited_s / total_s


if __name__ == "__main__":
    main()
