"""Checkpoints: exact under donation, verified to the last bit, and safe from full disks and half-written steps."""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podling.errors import InputError, RunError
from podling.run import manifest
from podling.run.checkpoint import CHUNK_BYTES, Checkpoints, hash_state, state_bytes
from podling.run.environment import environment, environment_changes
from podling.run.restore import STATE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict
    opt_state: tuple


def make_state(seed=0, size=64, sharding=None):
    keys = jax.random.split(jax.random.key(seed), 3)
    put = (lambda x: jax.device_put(x, sharding)) if sharding is not None else (lambda x: x)
    params = {"kernel": put(jax.random.normal(keys[0], (8, size))), "half": put(jnp.ones((8, 2), jnp.bfloat16) / 3)}
    moments = {"kernel": put(jax.random.normal(keys[1], (8, size)))}
    return State(jnp.int32(seed), params, ({"mu": moments}, jnp.int32(7)))


def like(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


def save_now(checkpoints, step, state=None, **more):
    state = make_state(step) if state is None else state
    checkpoints.save(step, state, {"cursor": step}, **more)
    checkpoints.wait()
    return state


def test_a_saved_state_comes_back_bit_for_bit_with_its_meta(checkpoints):
    state = save_now(checkpoints, 3)
    restored, meta = checkpoints.restore(None, like(state), pytest.fail)
    assert hash_state(restored) == hash_state(state)
    assert type(restored) is State
    assert meta["cursor"] == 3
    assert meta["environment"] == environment()


def test_the_hash_sees_one_bit_a_name_and_a_dtype():
    state = {"a": np.zeros(4, np.float32)}
    flipped = np.zeros(4, np.float32)
    flipped[2] = np.float32(-0.0)  # equal to zero by value, different in one bit
    others = [{"a": flipped}, {"b": state["a"]}, {"a": np.zeros(4, np.int32)}, {"a": np.zeros((2, 2), np.float32)}]
    assert len({hash_state(tree) for tree in [state, *others]}) == 5
    assert hash_state(state) == hash_state({"a": jnp.zeros(4)})


def test_donating_the_state_right_after_save_does_not_touch_what_is_saved(checkpoints):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 2 + 1, s), donate_argnums=0)
    state = step(make_state(size=1 << 16))
    hashes = {}
    for number in range(1, 4):
        hashes[number] = hash_state(state)
        checkpoints.save(number, state, {})
        for _ in range(5):
            state = step(state)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    for number in checkpoints.steps():
        restored, _ = checkpoints.restore(number, like(state), pytest.fail)
        assert hash_state(restored) == hashes[number]


def test_save_and_restore_work_where_implicit_transfers_are_forbidden(checkpoints):
    state = make_state()
    with jax.transfer_guard("disallow"):
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, like(state), pytest.fail)
        assert hash_state(restored) == hash_state(state)


def test_restores_onto_the_shardings_asked_for(checkpoints):
    devices = np.array(jax.devices())
    if len(devices) < 8:
        pytest.fail("the tests need 8 emulated devices")
    rows = NamedSharding(jax.sharding.Mesh(devices, ("data",)), P("data"))
    grid = NamedSharding(jax.sharding.Mesh(devices.reshape(4, 2), ("data", "tensor")), P(("tensor",)))
    state = {"kernel": make_state(sharding=rows).params["kernel"]}
    checkpoints.save(1, state, {})
    wanted = {"kernel": jax.ShapeDtypeStruct(state["kernel"].shape, state["kernel"].dtype, sharding=grid)}
    restored, _ = checkpoints.restore(1, wanted, pytest.fail)
    assert restored["kernel"].sharding.is_equivalent_to(grid, 2)
    assert hash_state(restored) == hash_state(state)


@pytest.mark.parametrize("written_by", [1, 8])
def test_who_needs_a_part_of_an_array_need_not_read_all_of_it(checkpoints, written_by):
    """However many devices wrote it: arrays are kept in small chunks, and read chunk by chunk."""
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:written_by]), ("data",)), P("data"))
    array = jax.device_put(np.arange(4 << 20, dtype=np.float32).reshape(2048, 2048), sharding)
    save_now(checkpoints, 1, {"kernel": array})
    state = checkpoints.folder / "1" / STATE
    with ocp.PyTreeCheckpointer() as reader:
        (found,) = jax.tree.leaves(reader.metadata(state).item_metadata.tree)
    assert math.prod(found.storage.chunk_shape) * 4 <= CHUNK_BYTES < array.nbytes
    restored, _ = checkpoints.restore(None, {"kernel": like({"k": array})["k"]}, pytest.fail)
    np.testing.assert_array_equal(restored["kernel"], array)


def test_a_part_of_the_state_can_be_read_alone(checkpoints):
    state = save_now(checkpoints, 1)
    restored, _ = checkpoints.restore(1, {"params": like(state).params}, pytest.fail)
    assert list(restored) == ["params"]
    assert hash_state(restored) == hash_state({"params": state.params})


def test_keeps_the_last_few_and_the_best(checkpoints):
    for step, loss in enumerate([3.0, 1.0, 2.5, 2.0, 2.0], start=1):
        save_now(checkpoints, step, metric=loss)
    assert checkpoints.steps() == [2, 4, 5]
    assert (checkpoints.best(), checkpoints.latest()) == (2, 5)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["2", "4", "5"]


def test_without_metrics_there_is_no_best(checkpoints):
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ([], None, None)
    save_now(checkpoints, 1)
    assert checkpoints.best() is None


def test_a_flipped_bit_in_any_file_is_found_and_the_step_before_is_used(checkpoints):
    save_now(checkpoints, 1)
    state = save_now(checkpoints, 2)
    expected = hash_state(make_state(1))
    files = [path for path in (checkpoints.folder / "2").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        good = path.read_bytes()
        for position in {0, len(good) // 2, len(good) - 1}:
            bad = bytearray(good)
            bad[position] ^= 1 << (position % 8)
            path.write_bytes(bad)
            said = []
            restored, meta = checkpoints.restore(None, like(state), said.append)
            assert meta["cursor"] == 1, path
            assert hash_state(restored) == expected
            assert "2: checkpoint is damaged" in said[0] and path.name in said[0]
            assert "restored step 1" in said[1]
        path.write_bytes(good)
    _, meta = checkpoints.restore(None, like(state), pytest.fail)
    assert meta["cursor"] == 2


def test_the_manifest_guards_itself(checkpoints):
    save_now(checkpoints, 1)
    folder = checkpoints.folder / "1"
    good = (folder / manifest.NAME).read_bytes()
    manifest.read(folder)
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        (folder / manifest.NAME).write_bytes(bad)
        with pytest.raises(manifest.Damaged):
            manifest.read(folder)


@pytest.mark.parametrize("harm", ["truncate", "empty", "missing", "no manifest", "empty folder"])
def test_a_truncated_or_missing_file_falls_back(checkpoints, harm):
    save_now(checkpoints, 1)
    state = save_now(checkpoints, 2)
    folder = checkpoints.folder / "2"
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if harm == "truncate":
        os.truncate(largest, largest.stat().st_size - 1)
    elif harm == "empty":
        os.truncate(largest, 0)
    elif harm == "missing":
        largest.unlink()
    elif harm == "no manifest":
        (folder / manifest.NAME).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    said = []
    _, meta = checkpoints.restore(None, like(state), said.append)
    assert meta["cursor"] == 1
    assert "damaged" in said[0]


def test_none_good_is_an_input_error_that_names_each(checkpoints):
    with pytest.raises(InputError, match="there is no checkpoint"):
        checkpoints.restore(None, like(make_state()), pytest.fail)
    for step in (1, 2):
        state = save_now(checkpoints, step)
        (checkpoints.folder / str(step) / manifest.NAME).unlink()
    with pytest.raises(InputError) as caught:
        checkpoints.restore(None, like(state), lambda line: None)
    assert len(caught.value.problems) == 3
    with pytest.raises(InputError, match="there are: 1, 2"):
        checkpoints.restore(9, like(state), pytest.fail)


def test_training_on_from_the_fallback_replaces_the_damaged_step(checkpoints):
    save_now(checkpoints, 1)
    save_now(checkpoints, 4)
    (checkpoints.folder / "4" / manifest.NAME).write_text("{}")
    save_now(checkpoints, 3)
    assert checkpoints.steps() == [1, 3], "a damaged later step must not outlive, or crowd out, the new history"
    (checkpoints.folder / "3" / manifest.NAME).write_text("{}")
    state = save_now(checkpoints, 3)
    _, meta = checkpoints.restore(None, like(state), pytest.fail)
    assert meta["cursor"] == 3


def test_arrays_of_another_shape_are_all_named(checkpoints):
    state = save_now(checkpoints, 1)
    wanted = like(make_state(size=32))
    with pytest.raises(InputError) as caught:
        checkpoints.restore(1, wanted, pytest.fail)
    assert [problem.where.split(": ")[1] for problem in caught.value.problems] == [
        "params/kernel",
        "opt_state/0/mu/kernel",
    ]
    assert "float32[8, 64] in the checkpoint, float32[8, 32]" in str(caught.value)
    with pytest.raises(InputError, match="is not in this checkpoint"):
        checkpoints.restore(1, {"other": like(state).step}, pytest.fail)


def test_half_written_steps_are_invisible_and_removed_only_by_a_writer(checkpoints):
    state = save_now(checkpoints, 1)
    stale = checkpoints.folder / "2.partial"
    (stale / "state").mkdir(parents=True)
    (checkpoints.folder / "1.removed.partial").mkdir()
    reader = Checkpoints(checkpoints.folder)
    _, meta = reader.restore(None, like(state), pytest.fail)
    reader.close()
    assert meta["cursor"] == 1 and stale.exists()
    writer = Checkpoints(checkpoints.folder)
    writer.check_space(1)
    writer.close()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]


def test_space_is_checked_with_figures_and_path(checkpoints):
    assert state_bytes(like(make_state())) == state_bytes(make_state()) == 2 * (8 * 64 * 4) + 8 * 2 * 2 + 2 * 4
    checkpoints.check_space(1000)
    with pytest.raises(
        RunError, match=r"need 4000000\.0 GB more \(1000000\.0 GB each, up to 4 at a time\), only .* are free"
    ) as caught:
        checkpoints.check_space(10**15)
    assert str(checkpoints.folder) in str(caught.value)


def test_a_file_size_limit_stops_with_the_last_good_checkpoint_intact(tmp_path):
    """As on a full disk, the write fails in the background; it must come out, and hurt nothing that was there."""
    program = textwrap.dedent("""
        import resource, sys, pathlib
        import jax, jax.numpy as jnp
        from podling.errors import RunError
        from podling.run.checkpoint import Checkpoints, hash_state
        checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
        state = {f"w{i}": jax.random.normal(jax.random.key(i), (1 << 15,)) for i in range(30)}
        checkpoints.save(1, state, {})
        checkpoints.wait()
        for limit in (300_000, 300_000, 300_000, 2_000, 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                checkpoints.save(2, state, {})
                checkpoints.wait()
                sys.exit(f"{limit} was enough")
            except RunError as error:
                print(limit, error)
            assert [p.name for p in checkpoints.folder.iterdir()] == ["1"], list(checkpoints.folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoints.save(2, state, {})
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        for step in (1, 2):
            restored, _ = checkpoints.restore(step, like, sys.exit)
            assert hash_state(restored) == hash_state(state)
        checkpoints.close()
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, "the person reads one sentence, not Orbax's threads"
    said = done.stdout.splitlines()
    assert sum("2.partial: could not be written: File too large" in line for line in said) == 5, done.stdout
    assert sum("the checkpoint of step 1 is intact" in line for line in said) == 5, done.stdout


def test_an_error_of_the_background_save_surfaces_at_the_next_call(checkpoints, monkeypatch):
    state = save_now(checkpoints, 1)

    def full(folder, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "seal", full)
    checkpoints.save(2, state, {})
    with pytest.raises(RunError, match=r"2\.partial: could not be written: No space left on device"):
        checkpoints.save(3, state, {})
    monkeypatch.undo()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]
    save_now(checkpoints, 3)
    assert checkpoints.steps() == [1, 3]


def test_changes_of_the_environment_are_put_in_words():
    assert environment_changes({"environment": environment()}) == []
    before = environment() | {"jax": "0.1.0", "cpu_cores": 96}
    lines = environment_changes({"environment": before})
    assert lines == [
        f"JAX changed: 0.1.0 → {jax.__version__}",
        f"CPU cores changed: 96 → {environment()['cpu_cores']}",
    ]
    assert environment_changes({}) == []


def test_the_manifest_is_json_a_person_can_read(checkpoints):
    save_now(checkpoints, 5, metric=1.25)
    content = json.loads((Path(checkpoints.folder) / "5" / manifest.NAME).read_text())["content"]
    assert (content["step"], content["metric"]) == (5, 1.25)
    assert content["leaves"]["params/half"] == ["bfloat16", [8, 2]]
