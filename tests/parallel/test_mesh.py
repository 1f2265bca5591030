"""Reading a mesh, and the table of where axes lie."""

from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from podling.errors import InputError
from podling.model.spec import param_specs
from podling.parallel.axes import mesh_text, read_mesh
from podling.parallel.collectives import gather
from podling.parallel.mesh import batch_sharding, data_parallel, make_mesh, mesh_sizes, storage_sharding
from podling.parallel.rules import COMPUTE, STORAGE, activation_spec, compute_spec, storage_spec, stored_spec
from podling.presets import PRESETS


def test_auto_puts_all_devices_on_data():
    assert mesh_sizes("auto", 6) == {"data": 6, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize("text", ["data=2,tensor=4", " tensor = 4 , data = 2 ", "tensor=4,data=2,fsdp=1"])
def test_axes_in_any_order_and_absent_ones_are_one(text):
    assert mesh_sizes(text, 8) == {"data": 2, "fsdp": 1, "tensor": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensr=8", ["unknown axis 'tensr'", "did you mean tensor?"]),
        ("data=2,data=4", ["axis 'data' is given twice"]),
        ("data", ["'data' needs a whole number from 1 up", "data=2"]),
        ("data=0", ["'data=0' needs a whole number from 1 up"]),
        ("data=-2", ["'data=-2' needs a whole number from 1 up"]),
        ("fsdp=two", ["'fsdp=two' needs a whole number from 1 up", "fsdp=2"]),
        ("", ["is empty", "give auto"]),
        ("data=2,,fsdp=4", ["'data=2,,fsdp=4' has an empty part"]),
        ("data=2.0", ["'data=2.0' needs a whole number"]),
    ],
)
def test_text_that_is_no_mesh(text, words):
    with pytest.raises(InputError) as error:
        mesh_sizes(text, 8)
    for word in words:
        assert word in str(error.value)
    assert error.value.problems[0].where == "--mesh"


def test_all_problems_of_a_mesh_at_once():
    _, problems = read_mesh("dat=2,fsdp=0,tensor=2,tensor=2")
    assert len(problems) == 3


def test_a_mesh_of_another_number_of_devices():
    with pytest.raises(InputError, match=r"data 2 x fsdp 2 x tensor 1 is 4 devices, and there are 8") as error:
        mesh_sizes("data=2,fsdp=2", 8)
    assert "nearest --mesh: data=4,fsdp=2; data=2,fsdp=4; data=2,fsdp=2,tensor=2; " in str(error.value)


def test_a_mesh_has_all_three_axes_explicit():
    mesh = make_mesh("data=4,tensor=2")
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert data_parallel(mesh) == 4
    assert data_parallel(make_mesh("data=2,fsdp=4")) == 8
    assert make_mesh("auto", jax.devices()[:3]).size == 3


def test_storage_and_compute_of_an_axis():
    assert storage_spec(("layers", "qkv", "embed", "heads")) == PartitionSpec(None, None, "fsdp", "tensor")
    assert activation_spec(("batch", "sequence", "embed")) == PartitionSpec(("data", "fsdp"), None, None)
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert storage_sharding(mesh, ("vocab", "embed")).shard_shape((128, 64)) == (64, 32)
    assert batch_sharding(mesh, "micro", "batch", "sequence").shard_shape((3, 8, 16)) == (3, 2, 16)


def test_without_a_mesh_there_is_nothing_to_choose():
    x = jax.numpy.ones((4, 4))
    assert stored_spec(("embed", "mlp")) is None and compute_spec("batch", "embed") is None
    assert gather(x, ("embed", "mlp")) is x


@pytest.mark.parametrize("preset", PRESETS)
def test_no_parameter_has_one_mesh_axis_twice(preset):
    for leaf in jax.tree.leaves(param_specs(PRESETS[preset].config.model)):
        for table in (STORAGE, COMPUTE):
            used = [axis for axis in (table[name] for name in leaf.axes) if axis is not None]
            assert len(used) == len(set(used)), leaf


@dataclass(frozen=True)
class Chip:
    """A TPU device of one of several slices, as JAX shows it: every slice counts its coordinates from zero."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0
    process_index: int = 0


def slices_of_8(platform: str = "tpu", slices: int = 2) -> list[Chip]:
    each = [(x, y, 0) for y in range(4) for x in range(2)]
    return [Chip(8 * one + at, one, place, platform) for one in range(slices) for at, place in enumerate(each)]


@pytest.mark.parametrize("text", ["data=16", "data=4,fsdp=4", "data=2,fsdp=4,tensor=2"])
def test_slices_follow_one_another_along_data(text):
    chips = slices_of_8()
    mesh = make_mesh(text, [*chips[8:], *chips[:8]])  # in whatever order they are found
    half = mesh.shape["data"] // 2
    first, second = mesh.devices[:half], mesh.devices[half:]
    assert {chip.slice_index for chip in first.flat} == {0} and {chip.slice_index for chip in second.flat} == {1}
    alone = make_mesh(mesh_text({**mesh.shape, "data": half}), chips[:8])
    assert [chip.id for chip in first.flat] == [chip.id for chip in alone.devices.flat]
    assert [chip.coords for chip in second.flat] == [chip.coords for chip in first.flat]
    assert set(mesh.axis_types) == {AxisType.Explicit}


def test_what_needs_the_links_does_not_go_over_slices():
    with pytest.raises(InputError, match="data=1 is no multiple of 2: the 2 TPU slices") as error:
        make_mesh("fsdp=16", slices_of_8())
    assert error.value.problems[0].where == "--mesh" and "nearest --mesh: data=2,fsdp=8" in str(error.value)
    cards = make_mesh("fsdp=16", slices_of_8("gpu"))  # JAX calls machines slices
    assert [card.id for card in cards.devices.flat] == list(range(16))
