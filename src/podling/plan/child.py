"""The process that compiles one program: it alone loads the TPU compiler, whose messages stay in it.

Run as `python -m podling.plan.child FOLDER PARENT` (a process id) with a job as JSON on stdin; it leaves `answer.json`
and, where the compiler took the program, `program.hlo.gz` in the folder. Where there is no space for them it ends with
the number of that error. Its environment is set by `podling.plan.compile`.
"""

import gzip
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from podling.config import from_dict
from podling.cost.hbm import memory_stats
from podling.errors import PodlingError
from podling.parallel.device import compute_dtype
from podling.parallel.mesh import make_mesh
from podling.plan.cache import NO_SPACE
from podling.topology import devices, parse_topology
from podling.train.lowering import lower_step


def end_with(parent: int, every_s: float = 1.0) -> None:
    """Have a thread end this process soon after its parent, killed, is gone: a compilation may take minutes more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, job: dict[str, Any]) -> None:
    """Compile the job's step and write down what the compiler says."""
    config = from_dict(job["config"], "job")
    if job["topology"]:
        found = devices(parse_topology(job["topology"]), job["slices"])
    else:
        found = jax.devices()
    mesh = make_mesh(job["mesh"], found)
    dtype = compute_dtype(config.train.dtype, job["platform"])
    with jax.set_mesh(mesh):
        began_s = time.perf_counter()
        lowered = lower_step(config, mesh, dtype, job["micro_batch"], job["accumulation"])
        lowered_s = time.perf_counter()
        try:
            compiled = lowered.compile()
        except Exception as error:  # XLA's own exception, whatever class it has
            answer: dict[str, Any] = {"refused": str(error)}
        else:
            (folder / "program.hlo.gz").write_bytes(gzip.compress(compiled.as_text().encode(), compresslevel=3))
            answer = {"memory": asdict(memory_stats(compiled))}
        answer |= {"lower_s": lowered_s - began_s, "compile_s": time.perf_counter() - lowered_s}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    try:
        main(Path(sys.argv[1]), json.load(sys.stdin))
    except OSError as failed:
        if failed.errno in NO_SPACE:
            os._exit(failed.errno)
        raise
    except PodlingError as error:
        answer = {"problems": [vars(problem) for problem in error.problems]}
        (Path(sys.argv[1]) / "answer.json").write_text(json.dumps(answer))
