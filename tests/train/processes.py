"""Runs of several processes on this machine: `podling train` with its three flags, each with its emulated devices."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podling.config import Config, to_dict

PATIENCE_S = 240


@dataclass
class Ended:
    """What came of one process."""

    code: int
    answer: dict[str, Any]
    """The JSON object it printed."""
    said: str
    """Everything else."""


def start(
    folder: Path,
    configs: Sequence[Config],
    devices: int,
    before: Mapping[int, Sequence[str]] | None = None,
    cwd: Sequence[Path] | None = None,
) -> list[subprocess.Popen]:
    """One process for each configuration, each with so many devices.

    Args:
        folder: for their configurations and what they print.
        configs: of each process.
        devices: of each process.
        before: what starts a process, by number, in podling's place: a command that takes podling's as its arguments.
        cwd: where each of them runs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    processes = []
    for process, config in enumerate(configs):
        file = folder / f"config{process}.json"
        file.write_text(json.dumps(to_dict(config)))
        command = [sys.executable, "-m", "podling", "train", "--config", str(file), "--json"]
        if len(configs) > 1:
            command += ["--coordinator", f"127.0.0.1:{port}"]
            command += ["--num-processes", str(len(configs)), "--process-id", str(process)]
        # Files, not pipes: nobody reads while we wait for another of them.
        with open(folder / f"said{process}", "w") as said, open(folder / f"answer{process}", "w") as answer:
            processes.append(
                subprocess.Popen(
                    [*(before or {}).get(process, ()), *command],
                    stdout=answer,
                    stderr=said,
                    env=env,
                    cwd=cwd[process] if cwd else None,
                )
            )
    return processes


def end(folder: Path, processes: list[subprocess.Popen]) -> list[Ended]:
    """Wait for all; when one outlasts our patience all are killed, and the test fails."""
    try:
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    results = []
    for process, code in enumerate(codes):
        answer = (folder / f"answer{process}").read_text()
        said = (folder / f"said{process}").read_text()
        results.append(Ended(code, json.loads(answer) if answer.strip() else {}, said))
    return results


def run(folder: Path, config: Config, count: int, devices: int) -> list[Ended]:
    """The same configuration in `count` processes."""
    return end(folder, start(folder, [config] * count, devices))
