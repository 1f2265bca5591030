"""Train one small GPT-2 on every factorisation of eight devices and print how far each is from one device.

    python bench/mesh_table.py                # 20 steps, SGD and AdamW: some minutes on a laptop
    python bench/mesh_table.py --micro 2      # with gradient accumulation
    python bench/mesh_table.py --json

The devices are emulated on the CPU. float32, dropout off. Losses: largest relative difference over the steps.
Parameters: largest difference as a share of the leaf's largest value, after the last step. Under AdamW the key bias is
left out and judged by its gradient (see docs/mesh.md). Bytes and collectives are one device's, per step.
"""

import argparse
import itertools
import json
import math
import os
import sys
from typing import Any
from unittest.mock import patch

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig  # noqa: E402
from podling.hlo.collectives import find_collectives, totals  # noqa: E402
from podling.hlo.program import read_program  # noqa: E402
from podling.parallel.mesh import MESH_AXES, batch_sharding, make_mesh  # noqa: E402
from podling.train.optimizer import make_optimizer  # noqa: E402
from podling.train.step import DeviceBatch, init_state, make_train_step  # noqa: E402

ROWS = 16
CONFIG = Config(
    model=ModelConfig(layers=3, heads=8, embed=48, mlp=80, context=16, vocab_size=250),
    optimizer=OptimizerConfig(warmup_steps=2),
    train=TrainConfig(steps=20, seed=1),
)
SGD_LR = 0.3
ALONE = "data=1,fsdp=1,tensor=1"
MESHES = [
    ",".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
    for sizes in itertools.product((1, 2, 4, 8), repeat=3)
    if math.prod(sizes) == 8
]
HEAD = (
    "| data × fsdp × tensor | SGD loss | SGD parameters | AdamW loss | AdamW parameters | key bias gradient "
    "| state bytes a device | bytes sent a step | collectives a step |"
)
LIMITS = {"loss": 1e-5, "sgd": 1e-5, "adamw": 2e-4, "key_bias": 1e-5}


def batch(step: int, micro_steps: int) -> DeviceBatch:
    """Sixteen rows of random tokens, some of them much more common, a fifth of the targets not scored."""
    rng = np.random.default_rng(step)
    tokens = (rng.random((ROWS, CONFIG.model.context + 1)) ** 3 * CONFIG.model.vocab_size).astype(np.int32)
    weights = (rng.random((ROWS, CONFIG.model.context)) < 0.8).astype(np.float32)
    shape = (micro_steps, ROWS // micro_steps, CONFIG.model.context)
    return DeviceBatch(tokens[:, :-1].reshape(shape), tokens[:, 1:].reshape(shape), weights.reshape(shape))


def by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf) for path, leaf in leaves}


def train(text: str, steps: int, micro_steps: int, optimizer: str) -> dict[str, Any]:
    """Losses, final parameters, bytes of state on device 0 and the step's collectives."""
    mesh = make_mesh(text, jax.devices()[:1] if text == ALONE else jax.devices())
    make = (lambda *_: optax.sgd(SGD_LR)) if optimizer == "sgd" else make_optimizer
    with jax.set_mesh(mesh), patch("podling.train.step.make_optimizer", make):
        state = jax.jit(lambda: init_state(CONFIG))()
        pieces = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(state)]

        def put(step: int) -> DeviceBatch:
            return jax.device_put(batch(step, micro_steps), batch_sharding(mesh, "micro", "batch", "sequence"))

        step = jax.jit(make_train_step(CONFIG, np.float32), donate_argnums=0).lower(state, put(0)).compile()
        losses = []
        for index in range(steps):
            state, metrics = step(state, put(index))
            assert bool(metrics.finite)
            losses.append(float(metrics.loss))
    found = find_collectives(read_program(step.as_text()), dict(mesh.shape)) if mesh.size > 1 else []
    return {
        "losses": losses,
        "params": by_name(state.params),
        "mu": by_name(optax.tree_utils.tree_get(state.opt_state, "mu")) if optimizer == "adamw" else {},
        "state_bytes": sum(piece.nbytes for piece in pieces),
        "collectives": [vars(row) for row in totals(found)],
    }


def compare(got: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """Largest differences: losses relative, parameters as shares of their leaf's largest value."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(got["losses"], one["losses"], strict=True))
    worst, key_bias = 0.0, 0.0
    for name, value in one["params"].items():
        other, largest = got["params"][name], np.abs(value).max()
        if name == "blocks.qkv_bias" and got["mu"]:
            mu = got["mu"][name]
            key_bias = float(np.abs(mu[:, 1]).max() / np.abs(mu).max())
            value, other = value[:, [0, 2]], other[:, [0, 2]]
        worst = max(worst, float(np.abs(other - value).max() / largest))
    return {"loss": loss, "parameters": worst, "key_bias": key_bias}


def row(text: str, steps: int, micro_steps: int, ones: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One mesh against one device."""
    result: dict[str, Any] = {"mesh": text}
    for optimizer, one in ones.items():
        got = train(text, steps, micro_steps, optimizer)
        result[optimizer] = compare(got, one)
        # AdamW's, the last, stay: its state has both moments.
        result |= {key: got[key] for key in ("state_bytes", "collectives")}
    return result


def within(result: dict[str, Any]) -> bool:
    return all(
        result[optimizer]["loss"] < LIMITS["loss"]
        and result[optimizer]["parameters"] < LIMITS[optimizer]
        and result[optimizer]["key_bias"] < LIMITS["key_bias"]
        for optimizer in ("sgd", "adamw")
    )


def words(result: dict[str, Any]) -> str:
    """The row as Markdown; a collective as `times kind over axes`."""
    sgd, adamw = result["sgd"], result["adamw"]
    shown: dict[str, list[str]] = {}
    for total in result["collectives"]:
        shown.setdefault(total["kind"], []).append(f"{total['times']} {'+'.join(total['axes'])}")
    collectives = "; ".join(f"{kind} {', '.join(parts)}" for kind, parts in sorted(shown.items()))
    sent_bytes = sum(total["sent_bytes"] for total in result["collectives"])
    mesh = " × ".join(part.partition("=")[2] for part in result["mesh"].split(","))
    return (
        f"| {mesh} | {sgd['loss']:.1e} | {sgd['parameters']:.1e} | {adamw['loss']:.1e} | {adamw['parameters']:.1e} "
        f"| {adamw['key_bias']:.1e} | {result['state_bytes']:,} | {sent_bytes:,} | {collectives} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches per step; one device takes one piece")
    parser.add_argument("--mesh", action="append", help="only this mesh, such as data=2,fsdp=4,tensor=1; repeatable")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ones = {optimizer: train(ALONE, args.steps, 1, optimizer) for optimizer in ("sgd", "adamw")}
    if not args.json:
        fell = {name: f"{one['losses'][0]:.3f} to {one['losses'][-1]:.3f}" for name, one in ones.items()}
        print(f"{args.steps} steps, {args.micro} micro-batches. On one device the loss went from {fell['sgd']} under")
        print(f"SGD and from {fell['adamw']} under AdamW, whose state is {ones['adamw']['state_bytes']:,} bytes.\n")
        print(HEAD + "\n" + "|---" * 9 + "|")
    rows = []
    for text in args.mesh or MESHES:
        rows.append(row(text, args.steps, args.micro, ones))
        if not args.json:
            print(words(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"steps": args.steps, "micro_steps": args.micro, "limits": LIMITS, "meshes": rows}, indent=1))
    wrong = [result["mesh"] for result in rows if not within(result)]
    if wrong:
        print(f"\nOver the limits {LIMITS}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
