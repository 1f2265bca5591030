"""Compiled programs survive a session, and only whole ones do."""

import json
import subprocess
import sys

import pytest

from podling.run.compile_cache import HASHES

PROGRAM = """
import sys, pathlib
import jax, jax.numpy as jnp
from podling.run import compile_cache
compile_cache.WORTH_S = 0
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
cache = compile_cache.CompileCache(pathlib.Path(sys.argv[1]))
print(float(jax.jit(lambda x: jnp.sin(x @ x).sum() + jnp.cos(x).sum())(jnp.ones((64, 64)))), len(hits))
if sys.argv[2] == "seal":
    cache.seal()
"""


def session(folder, then="seal"):
    """One process; gives the number it computed and how many programs it found compiled."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(folder), then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    value, hits = done.stdout.split()
    return float(value), int(hits)


def entries(folder):
    return [path for path in folder.iterdir() if path.name != HASHES]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A sealed cache, which each test leaves sealed; a copy would not do, its path is part of JAX's keys."""
    folder = tmp_path_factory.mktemp("warm") / "cache"
    value, hits = session(folder)
    assert hits == 0
    return folder, value


def test_a_second_session_compiles_nothing(warm):
    folder, value = warm
    assert session(folder) == (value, len(entries(folder)))


@pytest.mark.parametrize("harm", ["bit", "torn", "hashes"])
def test_what_is_damaged_is_compiled_anew_and_never_run(warm, harm):
    """A bit flipped in the middle of each of these entries made this very program return NaN."""
    folder, value = warm
    if harm == "hashes":
        (folder / HASHES).write_text("{")
    else:
        for path in entries(folder):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 16
            path.write_bytes(data if harm == "bit" else data[: len(data) // 2])
    assert session(folder) == (value, 0)
    assert json.loads((folder / HASHES).read_text()).keys() == {path.name for path in entries(folder)}


def test_what_a_killed_session_left_unsealed_is_not_trusted(tmp_path):
    value, _ = session(tmp_path / "cache", then="die")
    assert session(tmp_path / "cache") == (value, 0)
