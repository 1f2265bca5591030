"""Our loss against nanoGPT's, on its public CPU recipe: characters, 4 layers, 4 heads, 128 wide, 2000 steps.

    git clone https://github.com/karpathy/nanoGPT
    pip install -e '.[parity]'
    python bench/nanogpt_char.py --peer nanogpt=nanoGPT --text shakespeare.txt

Both learn from the first 90% of the text's characters and are scored on the rest, in the same windows. Model,
hyperparameters, biases and the tanh GELU are the same; each draws its batches its own way: nanoGPT at random offsets,
podling in shuffled windows, each once an epoch. The means over the seeds must agree within 0.03 nats per character.

The peer's model.py is imported from the folder given, and trained here by the recipe's loop in float32; podling is run
as a command.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from podling.config import DataConfig
from podling.data.batches import EvalWindows, heldout_windows
from podling.data.prepare import prepare
from podling.data.shards import Prepared

AGREE = 0.03  # nats
LAYERS, HEADS, EMBED, BLOCK, ROWS, STEPS = 4, 4, 128, 64, 12, 2000
LR, MIN_LR, WARMUP, BETA1, BETA2, DECAY, CLIP = 1e-3, 1e-4, 100, 0.9, 0.99, 0.1, 1.0


def load_peer(spec: str) -> ModuleType:
    """The peer's model.py, its exact GELU replaced by GPT-2's tanh form."""
    import torch

    name, _, folder = spec.partition("=")
    path = Path(folder) / "model.py"
    if name != "nanogpt" or not path.is_file():
        raise SystemExit(f"--peer nanogpt=DIR: there is no {path}")
    loader = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    module.nn.GELU = partial(torch.nn.GELU, approximate="tanh")
    return module


def train_peer(module: ModuleType, train: np.ndarray, vocab: int, seed: int, steps: int):
    """The recipe's loop: random offsets, warm-up and cosine, AdamW with nanoGPT's own groups."""
    import torch

    torch.manual_seed(1337 + seed)
    shape = dict(n_layer=LAYERS, n_head=HEADS, n_embd=EMBED, block_size=BLOCK, vocab_size=vocab)
    model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=True))
    optimizer = model.configure_optimizers(DECAY, LR, (BETA1, BETA2), "cpu")
    data = torch.from_numpy(train.astype(np.int64))
    for step in range(steps):
        if step < WARMUP:
            lr = LR * (step + 1) / (WARMUP + 1)
        else:
            done = (step - WARMUP) / max(steps - WARMUP, 1)
            lr = MIN_LR + 0.5 * (1 + math.cos(math.pi * done)) * (LR - MIN_LR)
        for group in optimizer.param_groups:
            group["lr"] = lr
        at = torch.randint(len(data) - BLOCK, (ROWS,))
        x, y = (torch.stack([data[i + shift : i + shift + BLOCK] for i in at]) for shift in (0, 1))
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def score_peer(model, windows: EvalWindows) -> float:
    """Mean nats per character over the very windows that podling scores."""
    import torch

    total = 0.0
    with torch.no_grad():
        for start in range(0, len(windows.inputs), 256):
            part = slice(start, start + 256)
            x, y = (torch.from_numpy(a[part].astype(np.int64)) for a in (windows.inputs, windows.targets))
            logits, _ = model(x, y)  # without targets it would give the last position only
            nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            total += (nll * torch.from_numpy(windows.weights[part]).flatten()).sum().item()
    return total / float(windows.weights.sum())


def train_ours(prepared: Path, seed: int, steps: int, out: Path) -> float:
    """The product itself, in a process of its own; its held-out loss."""
    flags = {
        "data": prepared, "out": out, "seed": seed, "device": "cpu", "steps": steps, "lr": LR, "context": BLOCK,
        "batch-tokens": ROWS * BLOCK, "eval-every": 0, "checkpoint-every": 0,
        "model.layers": LAYERS, "model.heads": HEADS, "model.embed": EMBED, "model.mlp": 4 * EMBED,
        "optimizer.warmup-steps": WARMUP, "optimizer.lr-floor": MIN_LR / LR, "optimizer.beta1": BETA1,
        "optimizer.beta2": BETA2, "optimizer.weight-decay": DECAY, "optimizer.clip-norm": CLIP,
        "train.eval-tokens": 0, "train.samples": 0,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "podling", "train", "--json", *words, "--run.no-export"],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"podling train failed with code {done.returncode}")
    return json.loads(done.stdout)["val_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="nanogpt=DIR, a checkout of nanoGPT")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument(
        "--characters", type=int, default=1_115_394, help="how much of it (default: as tiny Shakespeare)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    module = load_peer(args.peer)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(args.text.read_text(encoding="utf-8")[: args.characters], encoding="utf-8")
        path = prepare(DataConfig(paths=(str(text),), tokenizer="char", holdout=0.1), Path(folder) / "data", None)
        prepared = Prepared.open(path)
        print(prepared.summary())
        train = np.array(prepared.tokens("train")[:])
        windows = heldout_windows(prepared, BLOCK, 0)
        vocab = prepared.tokenizer.vocab_size
        print(f"{len(train):,} characters to learn from, {int(windows.weights.sum()):,} scored, vocabulary {vocab}")
        losses: dict[str, list[float]] = {"nanoGPT": [], "podling": []}
        for seed in range(args.seeds):
            began = time.perf_counter()
            peer = score_peer(train_peer(module, train, vocab, seed, args.steps), windows)
            between = time.perf_counter()
            ours = train_ours(path, seed, args.steps, Path(folder) / f"run{seed}")
            losses["nanoGPT"].append(peer)
            losses["podling"].append(ours)
            seconds = f"{between - began:.0f} s, {time.perf_counter() - between:.0f} s"
            print(f"seed {seed}: nanoGPT {peer:.4f}, podling {ours:.4f} nats per character ({seconds})", flush=True)
    means = {name: float(np.mean(values)) for name, values in losses.items()}
    difference = means["podling"] - means["nanoGPT"]
    print(f"mean: nanoGPT {means['nanoGPT']:.4f}, podling {means['podling']:.4f}, difference {difference:+.4f}")
    if abs(difference) > AGREE:
        raise SystemExit(f"more than {AGREE} nats apart")


if __name__ == "__main__":
    main()
