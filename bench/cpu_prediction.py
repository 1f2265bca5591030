"""How well the time of a step on this CPU is foretold: predicted beside measured, for models of several shapes.

    JAX_PLATFORMS=cpu python bench/cpu_prediction.py                 all of them, about five minutes
    JAX_PLATFORMS=cpu python bench/cpu_prediction.py micro gpt2      some
    JAX_PLATFORMS=cpu python bench/cpu_prediction.py --rounds 5

Every round first measures the CPU and predicts, then runs steps, so that both meet the machine in the same mood; what
is printed are medians over the rounds. The prediction never sees a step. A machine with other work on it says little:
its cores are lent out between one measurement and the next.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from podling.config import Config
from podling.cost.cpu import cpu_step_time
from podling.cost.cpu_peaks import measure_cpu
from podling.hlo.program import read_program
from podling.parallel.mesh import batch_sharding, make_mesh
from podling.presets import preset_config
from podling.train.lowering import lower_step
from podling.train.step import DeviceBatch, init_state

# name: preset, vocabulary, context, rows, micro-steps, and what else is not the preset's
CASES = {
    "nano": ("gpt2-nano", 1024, 128, 16, 1, {}),
    "micro": ("gpt2-micro", 2048, 128, 16, 1, {}),  # what `podling train` runs
    "micro, 4 x 4 rows": ("gpt2-micro", 2048, 128, 4, 4, {}),
    "micro, remat full": ("gpt2-micro", 2048, 128, 16, 1, {"remat": "full"}),
    "micro, bytes, context 256": ("gpt2-micro", 257, 256, 8, 1, {}),
    "mini, 8 rows": ("gpt2-mini", 4096, 256, 8, 1, {}),
    "mini, loss chunks of 64": ("gpt2-mini", 4096, 256, 4, 1, {"loss_chunk": 64}),
    "gpt2, 4 rows of 64": ("gpt2", 50257, 64, 4, 1, {"remat": "none", "loss_chunk": 0}),
}


def configuration(preset: str, vocab_size: int, context: int, train: dict) -> Config:
    config = preset_config(preset)
    model = dataclasses.replace(config.model, vocab_size=vocab_size, context=context)
    return dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, **train))


def compare(name: str, rounds: int, steps_s: float) -> tuple[float, float]:
    """Predicted and measured seconds of a step."""
    preset, vocab_size, context, rows, micro_steps, train = CASES[name]
    config = configuration(preset, vocab_size, context, train)
    mesh = make_mesh("data=1", jax.devices()[:1])
    predicted, measured = [], []
    with jax.set_mesh(mesh):
        compiled = lower_step(config, mesh, jnp.dtype("float32"), rows, micro_steps).compile()
        program = read_program(compiled.as_text())
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        state = jax.jit(init_state, static_argnums=0)(config)
        tokens = np.random.default_rng(0).integers(0, vocab_size, (micro_steps, rows, context), np.int32)
        sharding = batch_sharding(mesh, "micro", "batch", "sequence")
        batch = DeviceBatch(*(jax.device_put(part, sharding) for part in (tokens, tokens, np.ones_like(tokens, float))))
        batch = dataclasses.replace(batch, weights=batch.weights.astype(jnp.float32))
        for _ in range(rounds):
            predicted.append(cpu_step_time(program, measure_cpu(program), mesh.shape, temp_bytes).step_s)
            state, metrics = compiled(state, batch)  # warms up
            jax.block_until_ready(metrics)
            until_s = time.perf_counter() + steps_s
            while time.perf_counter() < until_s:
                began_s = time.perf_counter()
                state, metrics = compiled(state, batch)
                jax.block_until_ready(metrics)
                measured.append(time.perf_counter() - began_s)
    return statistics.median(predicted), statistics.median(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps-s", type=float, default=3.0, help="seconds of steps in a round")
    args = parser.parse_args()
    print(f"{'':28}{'predicted':>12}{'measured':>12}{'off by':>9}")
    off = []
    for name in args.cases or CASES:
        predicted_s, measured_s = compare(name, args.rounds, args.steps_s)
        off.append(predicted_s / measured_s - 1)
        print(f"{name:28}{predicted_s * 1e3:9.1f} ms{measured_s * 1e3:9.1f} ms{off[-1]:+9.1%}", flush=True)
    print(f"largest {max(map(abs, off)):.1%}, median {statistics.median(map(abs, off)):.1%}, of {len(off)}")


if __name__ == "__main__":
    main()
