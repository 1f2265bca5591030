"""The estimate that ranks layouts against the compiler, layout by layout: memory and time, part by part.

    pip install -e '.[tpu]'                                  # Linux; no TPU is needed
    python bench/estimates.py --json compiled.json           # ten minutes on two cores; asked again, seconds

The coefficients of `podling/cost/analytic.py` and `podling/cost/step_bytes.py` are read off such a table; when the
model, the step or the compiler changes, it says how far off they have become. Ends with 1 when a time is more than 25%
off or a memory more than 15%: then layouts may be ranked wrongly, or left out although they fit.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from podling.cost.records import KINDS, Layout  # noqa: E402
from podling.plan.cache import Programs, default_folder  # noqa: E402
from podling.plan.compile import Compiler  # noqa: E402
from podling.plan.make import estimated  # noqa: E402
from podling.plan.target import parse_target  # noqa: E402
from podling.presets import preset_config  # noqa: E402

CASES = [
    ("gpt2", "v5e-1", Layout("data=1", 8, 1, "dots", 256)),
    ("gpt2", "v5e-1", Layout("data=1", 8, 1, "full", 256)),
    ("gpt2", "v5e-1", Layout("data=1", 8, 1, "none", 256)),
    ("gpt2", "v5e-1", Layout("data=1", 4, 1, "none", 256)),
    ("gpt2", "v5e-1", Layout("data=1", 2, 1, "dots", 256)),
    ("gpt2", "v5e-1", Layout("data=1", 8, 1, "dots", 0)),
    ("gpt2", "v5e-1", Layout("data=1", 16, 1, "dots", 256)),
    ("gpt2", "v5e-1", Layout("data=1", 16, 1, "full", 0)),
    ("gpt2", "v5e-1", Layout("data=1", 8, 4, "dots", 256)),
    ("gpt2", "v6e-1", Layout("data=1", 8, 1, "dots", 256)),
    ("gpt2-medium", "v5e-1", Layout("data=1", 4, 2, "full", 256)),
    ("gpt2-large", "v5e-1", Layout("data=1", 4, 1, "full", 256)),
    ("gpt2", "v5e-8", Layout("data=8", 64, 1, "dots", 256)),
    ("gpt2", "v5e-8", Layout("fsdp=8", 64, 1, "dots", 256)),
    ("gpt2", "v5e-8", Layout("fsdp=4,tensor=2", 64, 1, "dots", 256)),
    ("gpt2", "v5e-8", Layout("data=2,tensor=4", 32, 1, "dots", 256)),
    ("gpt2-xl", "v5e-256", Layout("data=32,fsdp=8", 512, 1, "full", 256)),
]


def main() -> int:
    """Compile the cases, or find them compiled, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=default_folder())
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--first", type=int, default=len(CASES), help="only so many cases")
    args = parser.parse_args()
    rows, worst = [], 0
    print(f"{'model':<12} {'chip':<8} {'layout':<58} {'GB':>6} {'est.':>6} {'ms':>8} {'est.':>6}   {KINDS}")
    for preset, chip, layout in CASES[: args.first]:
        target, config = parse_target(chip), preset_config(preset)
        batch = layout.micro_batch * layout.accumulation * config.model.context
        config = replace(
            config,
            model=replace(config.model, vocab_size=50257),
            train=replace(config.train, batch_tokens=batch),
        )
        found = Compiler(config, target, Programs(args.cache), lambda words: None).option(layout)
        guess = estimated(config, layout, target, 2)
        assert guess.time is not None
        bytes_off = guess.hbm.total_bytes / found.hbm.total_bytes
        step_off = guess.time.step_s / found.time.step_s if found.time else 1.0
        worst |= not (0.85 < bytes_off < 1.15 and 0.75 < step_off < 1.25)
        step = f"{1e3 * found.time.step_s:8.1f} {step_off:6.2f}" if found.time else " refused       "
        parts = (
            " ".join(f"{1e3 * found.time.parts_s[k]:.1f}/{1e3 * guess.time.parts_s[k]:.1f}" for k in KINDS)
            if (found.time)
            else ""
        )
        gigabytes = f"{found.hbm.total_bytes / 1e9:6.2f} {bytes_off:6.2f}"
        print(f"{preset:<12} {chip:<8} {layout!s:<58} {gigabytes} {step}   {parts}", flush=True)
        rows.append({
            "model": preset, "chip": chip, "layout": asdict(layout),
            "hbm": asdict(replace(found.hbm, largest=found.hbm.largest[:12])),
            "time": found.time and asdict(replace(found.time, ops=found.time.ops[:30])),
        })  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return worst


if __name__ == "__main__":
    sys.exit(main())
