"""The plan's choice against brute force: a grid of 24 layouts, every one of them compiled.

    pip install -e '.[tpu]'                      # Linux; no TPU is needed
    python bench/plan_grid.py                    # gpt2 on v5e-8: ten minutes on two cores
    python bench/plan_grid.py --model gpt2-medium --chip v5e-1

The grid: two meshes, two micro-batches, the three remat policies, the loss in one piece and in chunks of 256.
Both answers are by the same estimate of the step from the compiled program. Ends with 1 when the plan's choice is more
than 3% slower than the best of the grid.
"""

import argparse
import itertools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from podling.cost.records import Layout  # noqa: E402
from podling.files import show_binary  # noqa: E402
from podling.parallel.axes import batch_ways, read_mesh  # noqa: E402
from podling.plan.cache import Programs, default_folder  # noqa: E402
from podling.plan.compile import Compiler  # noqa: E402
from podling.plan.make import make_plan  # noqa: E402
from podling.plan.search import Limits  # noqa: E402
from podling.plan.target import parse_target  # noqa: E402
from podling.presets import preset_config  # noqa: E402

REMAT, CHUNKS = ("none", "dots", "full"), (0, 256)


def main() -> int:
    """Compile the grid, make the plan, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--chip", default="v5e-8")
    parser.add_argument("--meshes", nargs="+", help="default: all on data, all on fsdp")
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 8], help="of each device at once")
    parser.add_argument("--cache", type=Path, default=default_folder())
    args = parser.parse_args()
    target = parse_target(args.chip)
    config = preset_config(args.model)
    config = replace(config, model=replace(config.model, vocab_size=50257))
    devices = target.devices
    meshes = args.meshes or ([f"data={devices}", f"fsdp={devices}"] if devices > 1 else ["data=1"])
    total = config.train.batch_tokens // config.model.context
    limits = Limits(compiles=10, seconds=300, cache=args.cache)

    began_s = time.monotonic()
    plan = make_plan(config, frozenset(), target, None, None, print, limits)
    assert plan.chosen.time is not None
    print(f"\nthe plan took {time.monotonic() - began_s:.0f} s and {plan.compiled} compilations")

    compiler = Compiler(config, target, Programs(args.cache), print)
    best = float("inf")
    print(f"\n{'layout':<60} {'needs':>10} {'ms/step':>9}")
    for mesh, rows, remat, chunk in itertools.product(meshes, args.rows, REMAT, CHUNKS):
        micro = rows * batch_ways(read_mesh(mesh)[0])
        option = compiler.option(Layout(mesh, micro, total // micro, remat, chunk))
        step = f"{1e3 * option.time.step_s:9.1f}" if option.time else "  refused"
        print(f"{option.layout!s:<60} {show_binary(option.hbm.total_bytes):>10} {step}", flush=True)
        if option.time and option.fits:
            best = min(best, option.time.step_s)
    chosen_s = plan.chosen.time.step_s
    print(f"\nbest of the grid {1e3 * best:.1f} ms; the plan: {plan.chosen.layout}, {1e3 * chosen_s:.1f} ms")
    print(f"ratio {chosen_s / best:.3f}")
    return int(chosen_s > 1.03 * best)


if __name__ == "__main__":
    sys.exit(main())
