"""How fast `podling prepare` tokenizes, beside the bare library, and how much memory a huge file takes.

    python bench/prepare_throughput.py TEXT...                 MB/s against `tokenizers` alone, interleaved, medians
    python bench/prepare_throughput.py TEXT... --giant 5GB     peak memory and speed on a file of that size

Without TEXT it reads the standard library's source. The bare library gets its text in memory and its ids are thrown
away; prepare reads, cuts, checks and writes as well.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from podling.config import DataConfig
from podling.data.corpus import find_sources, iter_chunks
from podling.data.cutting import Cutter
from podling.data.encode import encode_segments
from podling.data.events import Meter
from podling.data.scan import choose_split, scan
from podling.data.vocabulary import build_tokenizer
from podling.files import parse_bytes, show_bytes

GIANT = """
import sys
from podling.config import DataConfig
from podling.data.prepare import prepare
from podling.data.shards import Prepared
last = {}
def tell(event):
    last[event.stage] = event
    if event.total_bytes:
        print(f"\\r{event.stage}: {event.done_bytes / event.total_bytes:4.0%} {event.mb_per_s:6.1f} MB/s",
              end=" " * 20, file=sys.stderr)
config = DataConfig(paths=(sys.argv[1],), tokenizer=sys.argv[2], vocab_size=int(sys.argv[3]), cache=sys.argv[4])
folder = prepare(config, progress=tell)
print(file=sys.stderr)
peak_mb = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1e3
print(Prepared.open(folder).summary())
print(", ".join(f"{stage} {event.mb_per_s:.1f} MB/s" for stage, event in last.items()))
print(f"peak memory {peak_mb:,.0f} MB")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--tokenizer", default="bpe")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--split-on-eot", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--giant", default="", help="size of one file made from the text, e.g. 5GB")
    flags = parser.parse_args()
    config = DataConfig(
        paths=tuple(flags.paths),
        tokenizer=flags.tokenizer,
        vocab_size=flags.vocab_size,
        split_on_eot=flags.split_on_eot,
    )
    with tempfile.TemporaryDirectory() as folder:
        if flags.giant:
            giant(config, parse_bytes(flags.giant, "--giant"), Path(folder))
        else:
            compare(config, flags.rounds, Path(folder))


def compare(config: DataConfig, rounds: int, folder: Path) -> None:
    """Print MB/s of the whole tokenizing pass and of the library's two calls on the same pieces."""
    sources = find_sources(config)
    found = scan(sources, config, None)
    split = choose_split(found, config.holdout)
    tokenizer = build_tokenizer(config, sources, total_bytes=found.total_bytes)
    texts = [piece.text for piece in Cutter(tokenizer.family).pieces(iter_chunks(sources, config))]
    backend = tokenizer._backend
    print(f"{show_bytes(found.total_bytes)} in {len(texts):,} pieces, {tokenizer.name}, {os.cpu_count()} cores")

    def prepared(number: int) -> None:
        target = folder / str(number)
        target.mkdir()
        encode_segments(target, sources, config, split, tokenizer, Meter("x", None, None))

    ways = {
        "podling prepare": prepared,
        "encode_batch": lambda _: backend.encode_batch(texts, add_special_tokens=False),
        "encode_batch_fast": lambda _: backend.encode_batch_fast(texts, add_special_tokens=False),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, work in ways.items():
            began = time.perf_counter()
            work(number)
            rates[name].append(found.total_bytes / 1e6 / (time.perf_counter() - began))
    for name, values in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["podling prepare"], values, strict=True))
        print(f"{name:18} {statistics.median(values):6.2f} MB/s   prepare is {ratio:.2f}x of it")


def giant(config: DataConfig, size: int, folder: Path) -> None:
    """Print what preparing one file of `size` bytes takes, in a process of its own."""
    path = folder / "giant.txt"
    texts = [chunk.text for chunk in iter_chunks(find_sources(config), config)]
    choose = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < size:
            # A made-up word every so often: real text of this size never stops showing new ones.
            file.write(choose.choice(texts))
            file.write(f" {choose.randbytes(5).hex()} ")
    print(f"one file of {show_bytes(path.stat().st_size)}")
    tokenizer = str(Path(config.tokenizer).absolute()) if os.path.exists(config.tokenizer) else config.tokenizer
    command = [sys.executable, "-c", GIANT, str(path), tokenizer, str(config.vocab_size), str(folder / "cache")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
