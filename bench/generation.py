"""Generation on the CPU against Hugging Face `transformers` with its key/value cache: same weights, same tokens.

    pip install -e '.[parity]'
    python bench/generation.py                 # 124M, float32, greedy, prompt 128, 128 new tokens, batch 1 and 8
    python bench/generation.py --rows 8 --rounds 5
    python bench/generation.py --only podling  # no peer: nothing is judged

Every system is a process of its own that loads the same random GPT-2 from one folder and stays; rounds are
interleaved. A round is one whole call: prompt in, last token out, streamed as the command streams it. `new tokens/s`
counts all new tokens over the whole call, `after the first` those after the first over the time after it, `first
token` is the time until it is known. Peak memory is that of generating, weights included and loading not. Both must
draw the same ids. Exit code 1: a target is missed, or the peer was skipped.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

TARGET = 1.8  # times the peer's new tokens/s
SYSTEMS = ("podling", "transformers")
VOCAB = 50257
Call = Callable[[list[list[int]], int], Iterator[list[list[int]]]]
"""From prompts and the number of new tokens to the ids of each row, as they come."""


def write_model(folder: Path, preset: str) -> None:
    """A GPT-2 with every leaf away from its initial value, in the layout that both sides read."""
    from safetensors.numpy import save_file

    from podling.interop.hf_config import hf_config
    from podling.interop.names import PREFIX, hf_shapes
    from podling.presets import PRESETS

    cfg = replace(PRESETS[preset].config.model, vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in hf_shapes(cfg).items():
        scale = 0.02 if len(shape) == 1 else cfg.embed**-0.5
        centre = 1.0 if ".ln_" in name + "." and name.endswith("weight") or name == "ln_f.weight" else 0.0
        tensors[PREFIX + name] = centre + scale * rng.standard_normal(shape, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(cfg, VOCAB - 1)))


def podling(folder: Path) -> Call:
    from podling.cli.platform import choose_platform

    choose_platform("cpu")
    import jax

    from podling.generate.decode import generate
    from podling.generate.settings import Settings
    from podling.interop.hf import import_hf

    model = import_hf(folder)
    params = jax.device_put(model.params, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    model = model.__class__(params, model.config, None, [])

    def call(prompts: list[list[int]], new: int) -> Iterator[list[list[int]]]:
        rows: list[list[int]] = [[] for _ in prompts]
        settings = Settings(max_tokens=new, temperature=0.0)
        for event in generate(model.params, model.config, prompts, settings, end_id=VOCAB - 1, never_ids=(VOCAB - 1,)):
            rows[event.row] += event.ids
            yield rows

    return call


def transformers(folder: Path) -> Call:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria
    from transformers.utils import logging

    logging.set_verbosity_error()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    class First(StoppingCriteria):
        """Told after every token; notes when the first was known."""

        def __init__(self) -> None:
            self.at = 0.0

        def __call__(self, input_ids, scores, **_):
            self.at = self.at or time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def call(prompts: list[list[int]], new: int) -> Iterator[list[list[int]]]:
        ids, first, began = torch.tensor(prompts), First(), time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,  # the end-of-text id is never drawn
                do_sample=False,
                use_cache=True,
                pad_token_id=VOCAB - 1,
                stopping_criteria=[first],
            )
        call.first_s = first.at - began  # type: ignore[attr-defined]
        yield out[:, ids.shape[1] :].tolist()

    return call


def work(name: str, folder: Path) -> None:
    """One system: a line in, a round, a line out."""
    began = time.perf_counter()
    call = {"podling": podling, "transformers": transformers}[name](folder)
    print(json.dumps({"load_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        rows, prompt, new = json.loads(line)
        prompts = np.random.default_rng(1).integers(0, VOCAB - 1, (rows, prompt)).tolist()
        forget_peak()
        began, first, ids = time.perf_counter(), 0.0, []
        for ids in call(prompts, new):  # noqa: B007 - the last is kept
            first = first or time.perf_counter() - began
        whole = time.perf_counter() - began
        first = getattr(call, "first_s", first)
        print(json.dumps({"first_s": first, "whole_s": whole, "peak_bytes": peak_bytes(), "ids": ids}), flush=True)


def forget_peak() -> None:
    """Linux: let the peak start anew from what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak then includes loading, for every system


def peak_bytes() -> int:
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Worker:
    """A system in its own process."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, __file__, "--worker", name, "--folder", str(folder)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}")
        return json.loads(line)

    def round(self, rows: int, prompt: int, new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps([rows, prompt, new]), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(names: list[str], folder: Path, rows: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Interleaved rounds of one batch size: figures by system."""
    workers = [Worker(name, folder) for name in names]
    first = {worker.name: worker.round(rows, args.prompt, args.new) for worker in workers}  # compiles, warms up
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for worker in workers:
            rounds[worker.name].append(worker.round(rows, args.prompt, args.new))
    for worker in workers:
        worker.close()
    found = {}
    for name, taken in rounds.items():
        whole = [rows * args.new / each["whole_s"] for each in taken]
        later = [rows * (args.new - 1) / (each["whole_s"] - each["first_s"]) for each in taken]
        found[name] = {
            "tokens_per_s": statistics.median(whole),
            "spread": [min(whole), max(whole)],
            "later_tokens_per_s": statistics.median(later),
            "first_token_s": statistics.median(each["first_s"] for each in taken),
            "cold_first_token_s": first[name]["first_s"],
            "peak_bytes": max(each["peak_bytes"] for each in taken),
            "ids": taken[0]["ids"],
        }
    return found


def show(rows: int, found: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """The table's lines for this batch size, and whether the target is met."""
    lines = []
    for name, figures in found.items():
        low, high = figures["spread"]
        lines.append(
            f"| {rows} | {name} | {figures['tokens_per_s']:.1f} ({low:.1f}-{high:.1f}) "
            f"| {figures['later_tokens_per_s']:.1f} | {figures['first_token_s']:.3f} "
            f"| {figures['cold_first_token_s']:.1f} | {figures['peak_bytes'] / 1e9:.2f} |"
        )
    if len(found) < len(SYSTEMS):
        skipped = ", ".join(name for name in SYSTEMS if name not in found)
        return [*lines, f"batch {rows}: not met: {skipped} was skipped"], False
    ours, peer = (found[name] for name in SYSTEMS)
    if ours["ids"] != peer["ids"]:
        return [*lines, f"batch {rows}: not met: the two draw different tokens"], False
    ratio, later = (ours[key] / peer[key] for key in ("tokens_per_s", "later_tokens_per_s"))
    met = ratio >= TARGET
    words = f"batch {rows}: {ratio:.2f} times (after the first token {later:.2f}), {TARGET} wanted: "
    return [*lines, words + ("met" if met else "not met") + "; the same tokens"], met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", help="preset (default: gpt2, 124M)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SYSTEMS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the random model here, or take it from here")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.folder)
    names = [name for name in SYSTEMS if args.only in (None, name) and (name == "podling" or find_spec(name))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").is_file():
            write_model(folder, args.model)
        found = {rows: measure(names, folder, rows, args) for rows in args.rows}
    shown = [show(rows, figures) for rows, figures in found.items()]
    if args.json:
        print(json.dumps({str(rows): figures for rows, figures in found.items()}))
    else:
        print("| batch | system | new tokens/s (min-max) | after the first | first token s | cold, s | peak GB |")
        print("|--:|---|--:|--:|--:|--:|--:|")
        for lines, _ in shown:
            print("\n".join(lines))
    if not all(met for _, met in shown):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
