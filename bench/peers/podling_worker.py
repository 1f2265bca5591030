"""podling's own training step as a worker of bench/cpu_training.py: `podling_worker.py WORK.json [FLAGS]`.

It goes the way of the command: what is set before JAX starts, the configuration out of flags, devices, mesh, batch plan
and the program that training runs. FLAGS are those of `podling train`.
"""

import dataclasses
import os
import sys

from work import Work, keep_stdout, serve


def main() -> None:
    work, flags = Work.load(sys.argv[1]), sys.argv[2:]
    words = {
        "--device": "cpu", "--dtype": "float32", "--context": work.context, "--batch-tokens": work.step_tokens,
        "--steps": 10**6, "--lr": work.lr,
        "--model.layers": work.layers, "--model.heads": work.heads, "--model.embed": work.embed,
        "--optimizer.schedule": "wsd", "--optimizer.warmup-steps": 0, "--optimizer.beta1": work.beta1,
        "--optimizer.beta2": work.beta2, "--optimizer.eps": work.eps, "--optimizer.clip-norm": work.clip,
        "--optimizer.weight-decay": work.weight_decay,
    }  # fmt: skip
    argv = [text for flag, value in words.items() for text in (flag, str(value))] + flags

    from podling.cli.platform import choose_platform
    from podling.cli.train import read

    config = read(argv)[2]
    choose_platform(config.run.device)
    say = keep_stdout()

    import jax
    import numpy as np

    from podling.measure.steps import Steps, in_turn, resolved
    from podling.train.setup import Setup

    tokens = np.fromfile(work.tokens, np.int32).reshape(-1, work.rows, work.context + 1)
    setup = Setup.of(resolved(config, work.vocab_size))
    with jax.set_mesh(setup.mesh):
        steps = Steps(setup, in_turn(tokens, setup.plan))
        train = dataclasses.asdict(setup.config.train)
        chosen = {name: train[name] for name in ("attention", "layer_loop", "loss_chunk", "remat")}
        mesh = {axis: size for axis, size in setup.mesh.shape.items() if size > 1}
        about = {"choices": {**chosen, **mesh}, "plan": str(setup.plan), "compile_s": steps.compile_s}
        about["xla_flags"] = os.environ.get("XLA_FLAGS", "")
        serve(work, lambda count: steps.take(count)[-1].loss, say, **about)


if __name__ == "__main__":
    main()
