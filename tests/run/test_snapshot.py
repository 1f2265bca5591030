"""A save on a CPU does not keep the next step from working in place, and needs its memory once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.parallel.mesh import make_mesh
from podling.run.checkpoint import Checkpoints
from podling.run.snapshot import Snapshots

SPECS = ((), ("data",), (None, "tensor"))


@pytest.fixture
def mesh():
    with jax.set_mesh(make_mesh("data=4,tensor=2", jax.devices())) as mesh:
        yield mesh


def make(scale: float):
    """Arrays that own their memory: what `device_put` gives may share it."""
    ones = jnp.arange(512.0 * 64).reshape(512, 64)
    specs = [jax.sharding.PartitionSpec(*spec) for spec in SPECS]
    values = jax.jit(lambda x: [jax.reshard(scale * x, spec) for spec in specs])(ones)
    return {str(number): leaf for number, leaf in enumerate(jax.block_until_ready(values))}


def places(state):
    return [shard.data.unsafe_buffer_pointer() for leaf in state.values() for shard in leaf.addressable_shards]


def test_a_snapshot_is_a_copy_and_the_next_one_takes_its_place(mesh):
    snapshots, state = Snapshots(), make(1.0)
    first = snapshots.of(state)
    assert not set(places(first)) & set(places(state))
    where = places(first)
    second = snapshots.of(make(2.0))
    assert places(second) == where
    for name, leaf in second.items():
        np.testing.assert_array_equal(leaf, make(2.0)[name])
        assert leaf.sharding == state[name].sharding


def test_a_state_of_other_shapes_gets_a_place_of_its_own(mesh):
    snapshots = Snapshots()
    snapshots.of(make(1.0))
    other = {"0": jnp.ones((3, 5))}
    np.testing.assert_array_equal(snapshots.of(other)["0"], other["0"])


def test_a_state_that_is_not_on_cpu_devices_is_taken_as_it_is():
    state = {"a": np.ones(3)}
    assert Snapshots().of(state) is state


def test_the_step_after_a_save_works_in_place_while_the_save_is_under_way(mesh, tmp_path, monkeypatch):
    """What is saved is the state as it was. Orbax reads the memory it was given while it writes; here, for longer."""
    checkpoints, held = Checkpoints(tmp_path / "checkpoints"), []
    save = checkpoints._orbax.save

    def slow_save(path, args):
        held.extend(np.asarray(shard.data) for leaf in args.item.values() for shard in leaf.addressable_shards)
        save(path, args=args)

    monkeypatch.setattr(checkpoints._orbax, "save", slow_save)
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: -leaf, state), donate_argnums=0)
    state = make(1.0)
    before = places(state)
    checkpoints.save(1, state, {})
    state = jax.block_until_ready(step(state))
    assert held and places(state) == before
    checkpoints.wait()
    restored = checkpoints.restore(1, state, pytest.fail)[0]
    checkpoints.close()
    for name, leaf in restored.items():
        np.testing.assert_array_equal(leaf, make(1.0)[name])
