"""Compile podling's own training step with the real TPU compiler and list what travels between the chips.

    pip install -e '.[tpu]'                                       # Linux; no TPU is needed
    python bench/tpu_collectives.py                               # the table: about ten compilations of a minute each
    python bench/tpu_collectives.py --model gpt2 --topology v5e:2x4 --mesh fsdp=8 --detail
    python bench/tpu_collectives.py --model gpt2 --topology v5e:2x4 --mesh data=8 --option xla_enable_async_all_reduce=true
    python bench/tpu_collectives.py --model gpt2 --topology v5e:2x4 --mesh data=8 --try-options

bfloat16, remat "dots", loss in chunks of 256, 1024 tokens a row. Counts and bytes are one chip's, per step. Times "in
the background" are those during which the compiler arranged for compute to go on; what the step waits for them is
predicted (podling.cost.step_time).
"""  # noqa: E501

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from podling.cost.step_time import step_time  # noqa: E402
from podling.hlo.collectives import Collective, find_collectives, totals  # noqa: E402
from podling.hlo.program import read_program  # noqa: E402
from podling.parallel.mesh import data_parallel, make_mesh  # noqa: E402
from podling.presets import preset_config  # noqa: E402
from podling.topology import Topology, devices, parse_topology  # noqa: E402
from podling.train.lowering import lower_step  # noqa: E402

VOCAB = 50257
JOBS = [  # model, topology, mesh, rows in each of the data x fsdp parts of the batch, micro-batches
    ("gpt2", "v5e:2x4", "data=8", 8, 1),
    ("gpt2", "v5e:2x4", "fsdp=8", 8, 1),
    ("gpt2", "v5e:2x4", "fsdp=4,tensor=2", 8, 1),
    ("gpt2", "v5e:2x4", "data=2,fsdp=4", 8, 4),
    ("gpt2-xl", "v5e:2x4", "fsdp=8", 2, 1),
    ("gpt2-xl", "v5e:2x4", "data=2,fsdp=4", 2, 1),
    ("gpt2", "v5e:16x16", "data=256", 8, 1),
    ("gpt2", "v5e:16x16", "data=16,fsdp=16", 8, 1),
    ("gpt2", "v5e:16x16", "data=16,fsdp=8,tensor=2", 8, 1),
    ("gpt2-xl", "v5e:16x16", "data=16,fsdp=16", 2, 1),
    ("gpt2-xl", "v5e:16x16", "data=4,fsdp=64", 2, 1),
]
OPTIONS = [  # each tried alone with --try-options
    {"xla_tpu_enable_async_collective_fusion": "false"},
    {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true"},
    {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true"},
    {"xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true"},
    {"xla_tpu_enable_async_collective_fusion_multiple_steps": "true"},
    {"xla_tpu_overlap_compute_collective_tc": "true"},
    {"xla_enable_async_all_gather": "true"},
    {"xla_enable_async_all_reduce": "true"},
    {"xla_enable_async_reduce_scatter": "true"},
    {"xla_tpu_enable_data_parallel_all_reduce_opt": "true"},
    {
        "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
        "xla_tpu_data_parallel_opt_different_sized_ops": "true",
    },
    {"xla_tpu_enable_latency_hiding_scheduler": "true"},
    {"xla_latency_hiding_scheduler_rerun": "2"},
    {"xla_tpu_scoped_vmem_limit_kib": "98304"},
]


def lowered(model: str, mesh: jax.sharding.Mesh, rows: int, micro_steps: int) -> Any:
    """The step on a mesh of chips that are not there: shapes only, and nothing runs."""
    preset = preset_config(model)
    config = dataclasses.replace(
        preset,
        model=dataclasses.replace(preset.model, vocab_size=VOCAB),
        train=dataclasses.replace(preset.train, remat="dots", loss_chunk=256),
    )
    with jax.set_mesh(mesh):
        return lower_step(config, mesh, jnp.bfloat16, rows, micro_steps)


def compiled(
    program: Any, mesh: jax.sharding.Mesh, options: dict[str, str], topology: Topology
) -> tuple[dict[str, Any], list[Collective]]:
    """Memory, collectives and time of the program under these compiler options, or the compiler's refusal."""
    began = time.perf_counter()
    try:
        done = program.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        return {"options": options, "refused": str(error).strip().splitlines()[0][:300]}, []
    memory = done.memory_analysis()
    read = read_program(done.as_text())
    found = find_collectives(read, dict(mesh.shape))
    step = step_time(read, topology.chip, dict(mesh.shape), topology)
    return {
        "options": options,
        "compile_s": round(time.perf_counter() - began, 1),
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "step_s": step.step_s,
        "links_s": sum(op.links_s for op in step.ops),
        "waited_s": step.parts_s["collective"],
        "unknown_loops": read.unknown_loops,
        "totals": [vars(row) for row in totals(found)],
        "collectives": [vars(one) | {"sent_bytes": one.sent_bytes} for one in found],
    }, found


def jobs(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int, int]]:
    if args.mesh:
        for mesh in args.mesh:
            yield args.model or "gpt2", args.topology or "v5e:2x4", mesh, args.rows or 8, args.micro or 1
        return
    for model, topology, mesh, rows, micro_steps in JOBS:
        if args.model in (None, model) and args.topology in (None, topology):
            yield model, topology, mesh, args.rows or rows, args.micro or micro_steps


def print_totals(result: dict[str, Any]) -> None:
    if "refused" in result:
        print(f"refused: {result['refused']}")
        return
    print(
        f"state {result['state_bytes'] / 2**30:.2f} GiB, temporaries {result['temporary_bytes'] / 2**30:.2f} GiB a "
        f"chip; compiled in {result['compile_s']:.0f} s"
    )
    step_ms, links_ms, waited_ms = (result[key] * 1e3 for key in ("step_s", "links_s", "waited_s"))
    print(
        f"predicted step {step_ms:.1f} ms; collectives are {links_ms:.1f} ms on the links, and the step waits "
        f"{waited_ms:.1f} ms for them, {waited_ms / step_ms:.1%} of it"
    )
    print("\n| collective | over | times | of them in the background | MB in | MB out | MB sent |\n" + "|---" * 7 + "|")
    for row in result["totals"]:
        mb = " | ".join(f"{row[key] / 1e6:,.2f}" for key in ("operand_bytes", "result_bytes", "sent_bytes"))
        print(f"| {row['kind']} | {' + '.join(row['axes'])} | {row['times']} | {row['asynchronous']} | {mb} |")
    if result["unknown_loops"]:
        print(f"\nLoops whose turns are unknown, counted once: {', '.join(result['unknown_loops'])}")


def print_detail(found: list[Collective]) -> None:
    print()
    for one in sorted(found, key=lambda one: -one.times * one.sent_bytes):
        cut = [f" of which only {piece} is used" if piece else "" for piece in one.cut]
        arrays = ", ".join(f"{a} -> {b}{c}" for a, b, c in zip(one.operands, one.results, cut, strict=False))
        how = "in the background" if one.asynchronous else "plain"
        print(f"{one.times} x {one.kind} over {' + '.join(one.axes)}, {how}, {one.sent_bytes:,} bytes sent: {arrays}")
        print(f"    {one.op_name}")


def difference(result: dict[str, Any], base: dict[str, Any]) -> str:
    """What an option changed, in words."""
    if "refused" in result:
        return f"refused: {result['refused']}"

    def table(rows: list[dict[str, Any]]) -> dict[tuple[str, tuple[str, ...]], dict[str, Any]]:
        return {(row["kind"], row["axes"]): row for row in rows}

    before, after = table(base["totals"]), table(result["totals"])
    parts = []
    for key in {**before, **after}:
        old, new = (
            (rows[key]["times"], rows[key]["asynchronous"]) if key in rows else (0, 0) for rows in (before, after)
        )
        if old != new:
            what = f"{key[0]} over {'+'.join(key[1])}"
            parts.append(f"{what}: {old[0]} ({old[1]} in the background) became {new[0]} ({new[1]})")
    gib = (result["temporary_bytes"] - base["temporary_bytes"]) / 2**30
    if abs(gib) >= 0.01:
        parts.append(f"temporaries {gib:+.2f} GiB")
    return "; ".join(parts) or "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a preset; with no --mesh, only this model's rows of the table")
    parser.add_argument("--topology", help="such as v5e:2x4")
    parser.add_argument("--mesh", action="append", help="such as fsdp=4,tensor=2; repeatable")
    parser.add_argument("--rows", type=int, help="rows in each of the data x fsdp parts of a step's batch")
    parser.add_argument("--micro", type=int, help="micro-batches per step")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="compiler option; repeatable"
    )
    parser.add_argument("--try-options", action="store_true", help="compile once more for each option of a list")
    parser.add_argument(
        "--detail", action="store_true", help="every collective with its shapes and where it comes from"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.option)
    results = []
    for model, topology, text, rows, micro_steps in jobs(args):
        where = parse_topology(topology)
        mesh = make_mesh(text, devices(where))
        program = lowered(model, mesh, rows * data_parallel(mesh) // micro_steps, micro_steps)
        job = {"model": model, "topology": topology, "mesh": text, "rows": rows, "micro_steps": micro_steps}
        result, found = compiled(program, mesh, options, where)
        result = job | result
        results.append(result)
        if not args.json:
            print(f"\n### {model} on {topology}, {text}: {rows} rows a batch shard in {micro_steps} micro-batches")
            print_totals(result)
            if args.detail:
                print_detail(found)
        for extra in OPTIONS if args.try_options and "refused" not in result else []:
            tried = job | compiled(program, mesh, options | extra, where)[0]
            results.append(tried)
            if not args.json:
                named = ", ".join(f"{name}={value}" for name, value in extra.items())
                print(f"- `{named}`: {difference(tried, result)}", flush=True)
        sys.stdout.flush()
    if args.json:
        print(json.dumps(results, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
