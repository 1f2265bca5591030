"""Cycles that the TPU compiler schedules for attention kernels: podling's own, and JAX's splash attention.

    pip install -e '.[tpu]'                     # Linux; no TPU is needed
    python bench/kernel_cycles.py               # a minute or two on two cores: the table of docs/attention.md
    python bench/kernel_cycles.py --sizes 512 2048 --chips v5e v6e

The compiler writes the wide instructions of every kernel into a folder. Our kernels are unrolled, so their number is
what one program takes. Splash runs its body once for every block of queries and keys below the diagonal, and a few
instructions for the others, which are left out here; so are transposes around it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADS, HEAD_DIM = 2, 64
SPLASH_BLOCK = 512
TOPOLOGY = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v4": "v4:2x2x1", "v5p": "v5p:2x2x1"}


def main() -> int:
    """Compile both attentions for every chip and length, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGY, default=["v5e", "v6e"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024], help="tokens of a sequence")
    parser.add_argument("--which", nargs="+", choices=["fused", "splash"], default=["fused", "splash"])
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_one(args.compile[0], int(args.compile[1]), args.compile[2])
        return 0
    print(f"cycles for {HEADS} heads of {HEAD_DIM} and one sequence, causal, bfloat16")
    print(f"{'chip':<5}{'tokens':>7}  {'kernel':<7}{'forward':>9}{'backward':>9}{'floor':>8}{'of peak':>9}")
    for chip in args.chips:
        for length in args.sizes:
            for which in args.which:
                report(chip, length, which)
    return 0


def report(chip: str, length: int, which: str) -> None:
    """One line: forward, backward, and the cycles of their operations at the chip's peak."""
    from podling.chips import CHIPS

    with tempfile.TemporaryDirectory() as folder:
        # The flags are read when libtpu is loaded, so that every program has a process of its own.
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environ = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        command = [sys.executable, __file__, "--compile", chip, str(length), which]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{chip:<5}{length:>7}  {which:<7}{done.stderr.strip().splitlines()[-1][:100]}")
            return
        counts = sorted(scheduled(Path(folder)).items())
    runs = 1
    if which == "splash":
        blocks = -(-length // SPLASH_BLOCK)
        runs = HEADS * blocks * (blocks + 1) // 2
    backward, forward = (runs * count for _, count in counts)  # their names in this order
    peak = CHIPS[chip].peak_flops["bfloat16"] / CHIPS[chip].clock_hz
    floor = 7 * HEADS * HEAD_DIM * length * (length + 1) / peak
    share = floor / (forward + backward)
    print(f"{chip:<5}{length:>7}  {which:<7}{forward:>9}{backward:>9}{floor:>8.0f}{share:>8.0%}", flush=True)


def scheduled(folder: Path) -> dict[str, int]:
    """Wide instructions of each kernel, by whether it is the backward pass's (0) or the forward pass's (1)."""
    found = {}
    for path in folder.glob("*schedule-analysis_final_bundles.txt"):
        name = re.sub(r"^\d+-", "", path.name)
        count = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())
        if count and ("attention" in name or "splash" in name):
            found["0 backward" if "backward" in name or "dkv" in name else "1 forward"] = int(count[1])
    return found


def compile_one(chip: str, length: int, which: str) -> None:
    """Both passes of one attention, ahead of time."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from podling.chips import CHIPS
    from podling.model.fused_attention import fused_attention
    from podling.model.splash import splash_attention

    one = {"chips_per_host_bounds": (1, 1, 1)} if TOPOLOGY[chip].endswith("1x1") else {}
    devices = topologies.get_topology_desc(topology_name=TOPOLOGY[chip], platform="tpu", **one).devices
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices[:1], ("x",)), jax.sharding.PartitionSpec())

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if which == "fused":
            return fused_attention(q, k, v, HEADS, mxu_size=CHIPS[chip].mxu_size or 128)
        heads = (x.reshape(*x.shape[:2], HEADS, HEAD_DIM) for x in (q, k, v))
        return splash_attention(*heads).reshape(q.shape)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(gradient)

    array = jax.ShapeDtypeStruct((8, length, HEADS * HEAD_DIM), jnp.bfloat16, sharding=sharding)
    jax.jit(both).lower(array, array, array, array).compile()


if __name__ == "__main__":
    sys.exit(main())
