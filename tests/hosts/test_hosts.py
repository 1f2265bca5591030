"""Real processes with real collectives: joining, voting, and what the others say when one is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from podling.errors import PodlingError
from podling.hosts.hosts import StopVote, agree, broadcast
from podling.hosts.join import HostArgs, quiet_gloo, together
from podling.hosts.waits import COMPILE_S, STEP_S, Waits

process, count, port, steps, voter = map(int, sys.argv[1:])
quiet_gloo()
say = lambda *words: print(*words, flush=True)
try:
    with together(HostArgs(f"127.0.0.1:{port}", count, process), say) as hosts:
        assert (jax.process_index(), jax.process_count(), jax.device_count()) == (process, count, 2 * count)
        assert broadcast(hosts, "mesh", process + 7) == 7
        agree(hosts, "configuration", {"--lr": "0.1"})
        mesh = jax.make_mesh((2, count, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        x = jax.make_array_from_callback((2 * count,), rows, lambda i: np.ones(1, np.float32))
        step = jax.jit(lambda x: jax.sharding.reshard(x.sum() * x / x.shape[0], rows))
        waits, vote, stop = Waits(hosts), StopVote(hosts), None
        waits.ask_for_saved(lambda: 500)
        end, hosts.member.end = hosts.member.end, lambda problem: (time.sleep(1), end(problem))
        with waits("first step", COMPILE_S):
            x = step(x).block_until_ready()
        say("going")
        for done in range(2, steps):
            with waits(f"step {done}", STEP_S):
                stop = vote.read()
                vote.vote(15 if (process, done) == (voter, 20) else None)
                if stop:
                    say(f"agreed on {stop} at {done}")
                    break
                x = step(x).block_until_ready()
except PodlingError as error:
    time.sleep(1)  # as above: JAX has time to abort, and does not
    say(*error.problems)
    os._exit(error.exit_code)
say("left")
"""


class Processes:
    """Some processes of `PROGRAM`, each with its output in a file."""

    def __init__(self, folder: Path, count: int, steps: int, voter: int = -1):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        program = folder / "program.py"
        program.write_text(PROGRAM)
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ.pop("XLA_FLAGS", None)
        self.outputs = [folder / f"{process}.txt" for process in range(count)]
        self.running: list[subprocess.Popen[bytes]] = []
        for process, output in enumerate(self.outputs):
            command = [sys.executable, str(program), *map(str, (process, count, port, steps, voter))]
            with output.open("w") as file:
                self.running.append(subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT))

    def said(self, process: int) -> str:
        return self.outputs[process].read_text()

    def until_all_say(self, word: str, limit_s: float = 60) -> None:
        until = time.monotonic() + limit_s
        while not all(word in self.said(process) for process in range(len(self.running))):
            assert all(process.poll() is None for process in self.running), [self.said(0), self.said(1)]
            assert time.monotonic() < until, [self.said(process) for process in range(len(self.running))]
            time.sleep(0.05)

    def codes(self, limit_s: float) -> list[int]:
        until = time.monotonic() + limit_s
        return [process.wait(timeout=max(0.1, until - time.monotonic())) for process in self.running]

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def test_a_signal_of_one_process_stops_all_at_the_same_step(tmp_path: Path) -> None:
    with Processes(tmp_path, count=3, steps=10**9, voter=1) as three:
        assert three.codes(limit_s=90) == [0, 0, 0], [three.said(process) for process in range(3)]
        said = [three.said(process).splitlines() for process in range(3)]
    assert said[0].pop(0).startswith("3 processes, meeting at 127.0.0.1:")
    assert said == [["going", "agreed on 15 at 21", "left"]] * 3  # and not a word of JAX's or Gloo's


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_others_say_so_and_stop(tmp_path: Path, victim: int) -> None:
    with Processes(tmp_path, count=3, steps=10**9) as three:
        three.until_all_say("going")
        three.running[victim].send_signal(signal.SIGKILL)
        codes = three.codes(limit_s=60)
        said = [three.said(process) for process in range(3)]
    others = [process for process in range(3) if process != victim]
    spoke = [process for process in others if f"process {victim} of 3 was lost (its connection" in said[process]]
    assert spoke, said
    for process in spoke:
        assert codes[process] == 1
        assert "; the last checkpoint is of step 500\n    run the same command to carry on" in said[process]
    for process in set(others) - set(spoke):  # Gloo may abort one of them first
        assert codes[process] == -signal.SIGABRT and "gloo" in said[process], said
