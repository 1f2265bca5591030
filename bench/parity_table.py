"""Print how far podling's GPT-2 is from `transformers` + PyTorch, for random small shapes and the published 124M one.

pip install -e '.[test,parity]'
python bench/parity_table.py            # small shapes: a minute
python bench/parity_table.py --large    # and the 124M shape: some minutes and 8 GB on a laptop
"""

import argparse
import dataclasses
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "parity"))

from reference import OPTIMIZER, Differences, compare  # noqa: E402
from test_parity import random_config  # noqa: E402

from podling.config import ModelConfig  # noqa: E402

GPT2 = ModelConfig(layers=12, heads=12, embed=768, mlp=3072, context=1024, vocab_size=50257)
HEAD = "| layers × heads × embed, mlp, vocab | batch | logits | loss | gradients | 3 steps | key bias | greedy | s |"


def row(cfg: ModelConfig, batch: str, found: Differences, seconds: float, note: str = "") -> str:
    name, worst = found.worst_adamw
    over = f", {found.adamw_over} numbers over 2e-4 ({name})" if found.adamw_over else ""
    greedy = f"{found.greedy_tokens} equal" if found.greedy else "DIFFER"
    return (
        f"| {cfg.layers} × {cfg.heads} × {cfg.embed}, {cfg.mlp}, {cfg.vocab_size}{note} | {batch} | {found.logits:.1e} "
        f"| {found.loss:.1e} | {found.worst_gradient[1]:.1e} | {worst:.1e}{over} | {found.key_bias_gradient:.1e} "
        f"| {greedy} | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", type=int, default=6, help="how many random small shapes")
    parser.add_argument("--large", action="store_true", help="the 124M shape too, with eps 1e-6 and 1e-8")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("Largest differences in float32; gradients, AdamW and key bias as shares of the leaf's largest value.\n")
    print(HEAD + "\n" + "|---" * 9 + "|")
    jobs = []
    for seed in range(args.small):
        cfg, how = random_config(seed)
        jobs.append((cfg, dict(how, seed=seed), ""))
    if args.large:
        for eps in (1e-6, 1e-8):
            optimizer = dataclasses.replace(OPTIMIZER, eps=eps)
            jobs.append((GPT2, dict(rows=1, length=64, seed=0, optimizer=optimizer), f", eps {eps:.0e}"))
    for cfg, how, note in jobs:
        began = time.perf_counter()
        found = compare(cfg, **how)
        print(row(cfg, f"{how['rows']} × {how['length']}", found, time.perf_counter() - began, note), flush=True)


if __name__ == "__main__":
    main()
