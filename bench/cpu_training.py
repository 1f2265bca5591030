"""podling's training step on this CPU beside those of its peers: the same work, in turn, round after round.

    git clone https://github.com/karpathy/nanoGPT && git clone https://github.com/karpathy/llm.c
    pip install -e '.[parity]'
    python bench/cpu_training.py char --peer nanogpt=nanoGPT --peer llmc=llm.c
    python bench/cpu_training.py gpt2-b4 --peer nanogpt=nanoGPT --only nanogpt-compile-fused --rounds 3

Works: char (nanoGPT's CPU example: 4 layers, 4 heads, 128 wide, 12 rows of 64 characters), char-6l (its character
model: 6 layers, 6 heads, 384 wide, 64 rows of 256), gpt2-b4 and gpt2-b2 (GPT-2 124M, 4 rows of 64 and 2 of 512).

The same for everyone: shape, float32, batch, AdamW with weight decay of matrices alone (llm.c decays all), gradients
clipped by their global norm (llm.c does not clip). GELU and attention are each system's own. Every system is a process
that stays; in a round each takes the steps of one sample, one system at a time. Given are medians over the rounds with
the smallest and largest, and memory: the peak while stepping, and of the whole process with compiling. A system's
first loss must be that of an untrained model, ln(vocabulary), and its last one lower.

A row is met when podling reaches the target against the fastest peer, of the character models with at most 1.2
times its memory, and no peer was left out. Rounds may be spread over several calls: --samples FILE keeps them, and the
table is made of all it holds.
--warm only fills the caches of the compilers, so that the next call spends its time on steps.
--variant NAME=WORDS adds podling once more: VAR=VALUE words are its environment, the rest flags of `podling train`.
"""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
from harness import Worker, build_llmc, llmc_command
from verdict import PEERS, table
from work import Work

WORKS = {
    work.name: work
    for work in (
        Work("char", 4, 4, 128, 65, rows=12, context=64, warmup_steps=20, target=1.15, most_memory=1.2),
        Work("char-6l", 6, 6, 384, 65, rows=64, context=256, warmup_steps=2, target=1.15, most_memory=1.2),
        Work("gpt2-b4", 12, 12, 768, 50257, rows=4, context=64, warmup_steps=2, target=1.5),
        Work("gpt2-b2", 12, 12, 768, 50257, rows=2, context=512, warmup_steps=2, target=1.5),
    )
}
BATCHES = 8


def write_tokens(work: Work, path: Path) -> None:
    """Tokens that can be learned: drawn by Zipf's law, so that the loss falls from the first steps on."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, work.vocab_size + 1)
    shape = (BATCHES, work.rows, work.context + 1)
    rng.choice(work.vocab_size, shape, p=weights / weights.sum()).astype(np.int32).tofile(path)


def commands(args: argparse.Namespace, work: Work, folder: Path) -> tuple[dict, dict[str, str]]:
    """Command and environment of every system that can run, and why the others cannot."""
    spec, peers = folder / "work.json", Path(__file__).parent / "peers"
    work.save(spec)
    cache = str(args.cache)
    keep = {"JAX_COMPILATION_CACHE_DIR": f"{cache}/jax", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ours = [sys.executable, str(peers / "podling_worker.py"), str(spec)]
    torch = [sys.executable, str(peers / "torch_worker.py"), str(spec)]
    found: dict[str, tuple[list[str], dict[str, str]]] = {"podling": (ours, keep)}
    for text in args.variant:
        name, _, rest = text.partition("=")
        words = shlex.split(rest)
        env = dict(word.split("=", 1) for word in words if not word.startswith("-") and "=" in word)
        found[name] = ([*ours, *(word for word in words if word.startswith("-") or "=" not in word)], keep | env)
    missing: dict[str, str] = {}
    for name in PEERS:
        if args.only and name not in args.only:
            missing[name] = "not asked for (--only)"
        elif name == "llmc":
            program = folder / "llmc"
            where = args.peers.get("llmc")
            missing[name] = build_llmc(Path(where).resolve(), program) if where else "no --peer llmc=DIR"
            found[name] = (llmc_command(program, work), {"OMP_NUM_THREADS": str(work.threads)})
        elif find_spec("torch") is None or (name == "transformers" and find_spec("transformers") is None):
            missing[name] = "not installed: pip install -e '.[parity]'"
        elif name == "transformers":
            found[name] = ([*torch, name], {})
        elif "nanogpt" not in args.peers:
            missing[name] = "no --peer nanogpt=DIR"
        else:
            env = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
            found[name] = ([*torch, name, str(Path(args.peers["nanogpt"]).resolve())], env)
    missing = {name: why for name, why in missing.items() if why}
    return {name: how for name, how in found.items() if name not in missing}, missing


def measure(args: argparse.Namespace, work: Work, folder: Path) -> tuple[list[dict], dict[str, str]]:
    """Start everyone, then take samples in turn until the rounds or the time are over.

    Returns:
        The samples, and why some systems have none.
    """
    until_s = time.perf_counter() + args.limit_s
    systems, missing = commands(args, work, folder)
    workers: list[Worker] = []
    rows: list[dict] = []
    try:
        for name, (command, environment) in systems.items():
            workers.append(Worker.start(name, command, environment, folder / f"{name}.log"))
        for worker in workers:
            if why := worker.ready():
                missing[worker.name] = why
            say(f"{worker.name} {why or f'is ready: {worker.about}'}")
        if "podling" in missing:
            raise SystemExit(f"podling {missing['podling']}")
        at_work = [worker for worker in workers if worker.name not in missing]
        call = f"{time.time():.3f}"
        for number in range(0 if args.warm else args.rounds):
            began_s = time.perf_counter()
            rows += one_round(args, work, at_work, call, until_s)
            took_s = time.perf_counter() - began_s
            told = ", ".join(f"{worker.name} {worker.samples[-1]['step_s'] * 1e3:.1f}" for worker in at_work)
            say(f"round {number + 1}: {told} ms")
            if time.perf_counter() + took_s > until_s:
                say(f"no time for another round (--limit-s {args.limit_s:.0f})")
                break
    finally:
        for worker in workers:
            worker.end()
    return rows, missing


def one_round(args: argparse.Namespace, work: Work, workers: list[Worker], call: str, until_s: float) -> list[dict]:
    """A sample of everyone, with what its call had in common; kept in the file at once."""
    rows = []
    for worker in workers:
        worker.fit(args.sample_s)
        before = len(worker.samples)
        worker.sample(until_s)
        about = {"call": call, "work": work.name, "name": worker.name, "clip": work.clip}
        about |= {"first_loss": worker.about["first_loss"], "whole_peak_bytes": worker.whole_peak_bytes}
        rows += [{**about, **sample} for sample in worker.samples[before:]]
    if args.samples:
        with open(args.samples, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


BEGAN_S = time.perf_counter()


def say(line: str) -> None:
    print(f"{time.perf_counter() - BEGAN_S:5.1f} s  {line}", file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", choices=list(WORKS), metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR", help="nanogpt=DIR, llmc=DIR")
    parser.add_argument("--only", default="", help=f"peers to run, by commas, of {', '.join(PEERS)}; or none")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=WORDS", help="podling, otherwise")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-s", type=float, default=1.0, help="seconds of steps in a sample; one step at least")
    parser.add_argument("--limit-s", type=float, default=75.0, help="no round is begun that would end after it")
    parser.add_argument("--clip", type=float, default=1.0, help="global gradient norm; 0 for none")
    parser.add_argument("--samples", type=Path, help="file to which samples are added, one JSON object a line")
    parser.add_argument("--warm", action="store_true", help="fill the compilers' caches and measure nothing")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "podling-bench-cache")
    args = parser.parse_args()
    args.peers = dict(text.split("=", 1) for text in args.peer)
    args.only = [name for name in args.only.split(",") if name]
    if unknown := set(args.peers) - {"nanogpt", "llmc"} | set(args.only) - {*PEERS, "none"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and files are put away
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in args.works:
        with tempfile.TemporaryDirectory(prefix="podling-bench-") as folder:
            tokens = Path(folder) / "tokens.bin"
            work = dataclasses.replace(WORKS[name], tokens=str(tokens), threads=cores, clip=args.clip)
            write_tokens(work, tokens)
            rows, missing = measure(args, work, Path(folder))
        if args.samples and args.samples.exists():
            kept = [json.loads(line) for line in args.samples.read_text(encoding="utf-8").splitlines()]
            rows = [row for row in kept if row["work"] == name and row["clip"] == work.clip]
        if rows:
            print(table(work, rows, missing), flush=True)


if __name__ == "__main__":
    main()
