"""What is chosen for a CPU: layers apart, small micro-batches, and memory that stays."""

import subprocess
import sys
from dataclasses import replace

import pytest

from podling.config import Config
from podling.tuning import MICRO_TOKENS, settled

FAULTS = """
import resource, sys
from podling import startup
assert startup.use_one_heap()
assert startup.keep_memory(int(sys.argv[1]), 1 << 34) == (sys.argv[2] == "kept")
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
size = 64 << 20
b"x" * size
before = faults()
for _ in range(8):
    b"x" * size
print(faults() - before)
"""


def test_layers_run_one_after_another():
    config = Config()
    assert settled(config, "cpu").train.layer_loop == "unroll"
    deep = replace(config, model=replace(config.model, layers=48))
    assert settled(deep, "cpu").train.layer_loop == "scan"
    assert MICRO_TOKENS["cpu"] >= config.train.batch_tokens  # the default run is taken in one piece


def _faults(*args: str, **env: str) -> int:
    plain = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **env}
    done = subprocess.run([sys.executable, "-c", FAULTS, *args], env=plain, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the page faults of a process")
def test_kept_memory_is_not_cleared_again():
    assert _faults("1", "kept") < 2000  # 16,384 pages of 4 KB each time
    assert _faults(str(1 << 33), "given back") > 100  # more than its share of the machine is given back
