"""A training step on TPUs by the plan's own estimate, beside the notebook-style program by the same: no TPU is needed.

    pip install -e '.[tpu]'                          # Linux
    python bench/tpu_speed.py                        # all rows; half an hour on two cores
    python bench/tpu_speed.py --only v5e-1           # rows whose name holds this
    python bench/tpu_speed.py --keep FOLDER          # keep compiled programs there, and take those that are there
    python bench/tpu_speed.py --stages               # and where the time of each goes

The notebook-style program is `bench/calibration/gpt2_notebook.py`, from Google's published settings: 9 rows a chip, no
accumulation. Ours is what `podling train` compiles: half a million tokens a step. MFU is of the published peak, with
`podling.train.flops` for the work in a token; attention kernels are counted as docs/calibration.md says.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(HERE / "calibration"))

from podling.config import Config, to_dict  # noqa: E402
from podling.cost.hbm import MemoryStats  # noqa: E402
from podling.cost.records import OpTime  # noqa: E402
from podling.cost.step_time import step_time  # noqa: E402
from podling.hlo.program import read_program  # noqa: E402
from podling.parallel.axes import read_mesh  # noqa: E402
from podling.plan.compile import run_child  # noqa: E402
from podling.plan.target import Target, parse_target  # noqa: E402
from podling.presets import preset_config  # noqa: E402
from podling.topology import compiler_environment  # noqa: E402
from podling.train.flops import flops_per_token  # noqa: E402

STAGES = ("attention", "mlp", "loss", "embedding", "final_norm", "optimizer")
NOTEBOOK_ROWS = 9  # of a chip


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    chip: str
    mesh: str
    rows: int  # of one device at a time
    wanted_mfu: float
    remat: str = "none"
    notebook: bool = False

    @property
    def name(self) -> str:
        return f"{'notebook' if self.notebook else self.model} {self.chip}"


ROWS = (
    Row("gpt2", "v5e-1", "data=1", NOTEBOOK_ROWS, 0, notebook=True),
    Row("gpt2", "v5e-1", "data=1", 16, 0.70),
    Row("gpt2", "v5e-8", "data=8", NOTEBOOK_ROWS, 0, notebook=True),
    Row("gpt2", "v5e-8", "data=8", 16, 0.70),
    Row("gpt2", "v6e-8", "data=8", NOTEBOOK_ROWS, 0, notebook=True),
    Row("gpt2", "v6e-8", "data=8", 16, 0.50),
    Row("gpt2-medium", "v5e-8", "data=8", 8, 0.70),
    Row("gpt2-xl", "v5e-8", "fsdp=8", 4, 0.70, remat="dots"),
)


@dataclass(frozen=True)
class Figures:
    """What is predicted of a row."""

    name: str
    step_s: float
    tokens_per_s: float
    mfu: float
    hbm_bytes: int
    compile_s: float
    stages_s: dict[str, float]


def ours(row: Row, target: Target, folder: Path) -> tuple[int, Config]:
    """Compile the step that training runs; tokens of a step, and the configuration."""
    config = preset_config(row.model)
    micro_batch = row.rows * target.devices
    steps = config.train.batch_tokens // (micro_batch * config.model.context)
    train = replace(config.train, micro_batch=micro_batch, remat=row.remat)
    config = replace(config, model=replace(config.model, vocab_size=50257), train=train)
    assert target.topology is not None
    job = {
        "topology": target.topology.name, "slices": 1, "devices": target.devices, "platform": "tpu",
        "mesh": row.mesh, "micro_batch": micro_batch, "accumulation": steps, "config": to_dict(config),
    }  # fmt: skip
    if not (folder / "program.hlo.gz").exists():
        answer = run_child(folder, job)
        if "refused" in answer:
            raise SystemExit(f"{row.name}: the compiler refuses it: {answer['refused'][:300]}")
    return steps * micro_batch * config.model.context, config


def notebooks(row: Row, target: Target, folder: Path) -> tuple[int, Config]:
    """The same for the notebook-style program, compiled by a process of its own."""
    if not (folder / "program.hlo.gz").exists():
        environment = {**os.environ, **compiler_environment()}
        command = [sys.executable, __file__, "--child", row.name, "--keep", str(folder)]
        subprocess.run(command, env=environment, check=True)
    config = preset_config("gpt2")
    config = replace(config, model=replace(config.model, vocab_size=50257))
    return NOTEBOOK_ROWS * target.devices * config.model.context, config


def child(row: Row, folder: Path) -> None:
    """Compile the notebook-style program for a row's chips; writes what `podling.plan.child` would."""
    import time

    import gpt2_notebook
    from cases import Case
    from compiler import lower_case

    from podling.cost.hbm import memory_stats

    target = parse_target(row.chip)
    assert target.topology is not None
    rows = NOTEBOOK_ROWS * target.devices
    mesh = {"data": target.devices}
    case = Case(row.name, target.topology.name, lambda _: gpt2_notebook.build(rows, dropout=False), mesh, 0)
    began_s = time.perf_counter()
    compiled = lower_case(case).compile()
    answer = {"memory": asdict(memory_stats(compiled)), "compile_s": time.perf_counter() - began_s}
    (folder / "answer.json").write_text(json.dumps(answer))
    (folder / "program.hlo.gz").write_bytes(gzip.compress(compiled.as_text().encode(), compresslevel=3))


def figures(row: Row, keep: Path) -> Figures:
    """Compile a row, or take what lies in the folder, and predict it."""
    target, folder = parse_target(row.chip), keep / row.name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    tokens, config = (notebooks if row.notebook else ours)(row, target, folder)
    answer = json.loads((folder / "answer.json").read_text())
    program = read_program(gzip.decompress((folder / "program.hlo.gz").read_bytes()).decode())
    mesh = {"data": target.devices} if row.notebook else read_mesh(row.mesh)[0]
    took = step_time(program, target.chip, mesh, target.topology)
    work = flops_per_token(config.model) * tokens / target.devices
    held = MemoryStats(**answer["memory"]).total_bytes
    stages: dict[str, float] = {}
    for op in took.ops:
        stages[stage(op)] = stages.get(stage(op), 0.0) + op.step_s
    mfu = work / target.chip.peak_flops["bfloat16"] / took.step_s
    return Figures(row.name, took.step_s, tokens / took.step_s, mfu, held, answer["compile_s"], stages)


def stage(op: OpTime) -> str:
    """Where in the model an instruction comes from."""
    if op.kind == "collective":
        return "collectives"
    return next((stage for stage in STAGES if stage in op.op_name), "between")


def main() -> int:
    """Print the table; 1 where a row misses what is wanted of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(next(row for row in ROWS if row.name == given.child), given.keep)
        return 0
    found: dict[str, Figures] = {}
    missed = False
    print("| program | tokens/s | against the notebook's | MFU | wanted | HBM, GiB | compiled in, s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for row in (row for row in ROWS if given.only in row.name):
            one = found[row.name] = figures(row, given.keep or Path(scratch))
            other = found.get(f"notebook {row.chip}")
            compared = other is not None and row.model == "gpt2" and not row.notebook
            ratio = f"{one.tokens_per_s / other.tokens_per_s:.2f}x" if compared and other else "-"
            missed |= one.mfu < row.wanted_mfu
            print(
                f"| {row.name} | {one.tokens_per_s:,.0f} | {ratio} | {one.mfu:.1%} | {row.wanted_mfu:.0%} "
                f"| {one.hbm_bytes / 2**30:.1f} | {one.compile_s:.0f} |",
                flush=True,
            )
    if given.stages:
        names = dict.fromkeys(name for one in found.values() for name in one.stages_s)
        print(f"\n| program | ms a step | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
        for one in found.values():
            shares = " | ".join(f"{one.stages_s.get(name, 0) / one.step_s:.1%}" for name in names)
            print(f"| {one.name} | {1e3 * one.step_s:.1f} | {shares} |")
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found.values()], indent=1))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
