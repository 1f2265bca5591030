"""Topologies by name, and that podling numbers their devices as the TPU compiler does."""

import math
import os
import subprocess
import sys

import pytest

from podling import topology
from podling.errors import InputError, RunError
from podling.layout.grid import grid_of_topology, legend
from podling.topology import SHAPES, compiler_environment, compiler_missing, parse_topology, placed


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v5e:2x4", "v5e:2x4", 8),
        ("v5e:16x16", "v5e:16x16", 256),
        ("v5e:1x1", "v5e:1x1", 1),
        ("v6e:2x4", "v6e:2x4", 8),
        ("v4:2x2x1", "v4:2x2x1", 4),
        ("v5p:2x2x1", "v5p:2x2x1", 4),
        ("v3:2x2", "v3:2x2", 8),  # each core is a device
        ("v5e-8", "v5e:2x4", 8),
        ("V5E-256 ", "v5e:16x16", 256),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v6e-1", "v6e:1x1", 1),
        ("v4-16", "v4:2x2x2", 8),  # the cloud counts cores here
        ("v3-8", "v3:2x2", 8),
    ],
)
def test_names(text, name, devices):
    parsed = parse_topology(text)
    assert (parsed.name, parsed.devices, len(parsed.in_order())) == (name, devices, devices)
    assert parse_topology(parsed.name) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v9:2x2", ["no TPU 'v9'", "v5e, v5p"]),
        ("v5e", ["not the name of a topology", "v5e:2x4"]),
        ("", ["not the name of a topology"]),
        ("v5e:3x3", ["there is no v5e:3x3", "v5e:2x2, v5e:2x4, v5e:4x4"]),
        ("v5e:0x2", ["there is no v5e:0x2"]),
        ("v5e:2x2x1", ["there is no v5e:2x2x1"]),
        ("v5e:32x32", ["there is no v5e:32x32", "v5e:16x16"]),
        ("v4:2x2", ["there is no v4:2x2", "v4:2x2x1", "multiples of 4x4x4"]),
        ("v4:16x16x32", ["there is no v4:16x16x32"]),  # of cubes, and more than there are
        ("v5e-7", ["there is no v5e-7", "v5e-1, v5e-4, v5e-8, v5e-16"]),
        ("v4-4", ["known: v4-8, v4-16"]),
    ],
)
def test_what_is_no_topology(text, words):
    with pytest.raises(InputError) as error:
        parse_topology(text)
    assert error.value.problems[0].where == "--topology"
    for word in words:
        assert word in str(error.value)


def test_every_friendly_size_is_a_real_shape():
    for kind, shapes in SHAPES.items():
        with pytest.raises(InputError) as error:
            parse_topology(f"{kind}-3")
        sizes = error.value.problems[0].fix.removeprefix("known: ").split(", ")
        assert len(sizes) == len(shapes)
        for size, shape in zip(sizes, shapes, strict=True):
            parsed = parse_topology(size)
            chip = parsed.chip
            assert parsed.shape == shape and math.prod(shape) <= chip.most_chips and len(shape) == chip.dims
            assert parsed.devices * (1 if chip.split_cores else chip.cores) == int(size.partition("-")[2])


def test_turned_grids_and_whole_cubes_exist_too():
    assert parse_topology("v5e:4x2").shape == (4, 2)
    assert parse_topology("v5p:4x4x12").devices == 192


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v5e:2x4", (False, False)),
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True, True)),
        ("v3:16x16", (False, False)),
        ("v4:2x2x4", (False, False, False)),  # without a whole cube, no axis is closed
        ("v5p:4x4x8", (True, True, True)),
    ],
)
def test_which_axes_are_rings(name, rings):
    assert parse_topology(name).rings == rings


def test_devices_are_numbered_x_first_and_hosts_hold_two_by_two():
    cells = parse_topology("v5e:4x4").in_order()
    assert [(cell.id, cell.coords) for cell in cells[:5]] == [
        (0, (0, 0, 0)), (1, (1, 0, 0)), (2, (2, 0, 0)), (3, (3, 0, 0)), (4, (0, 1, 0)),
    ]  # fmt: skip
    assert [cell.process for cell in cells] == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
    assert [(cell.core, cell.coords[0]) for cell in parse_topology("v3:2x2").in_order()[:3]] == [(0, 0), (1, 0), (0, 1)]


def test_without_the_compiler_the_arrangement_is_said_to_be_assumed(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    grid = grid_of_topology(parse_topology("v5e:2x4"), {"data": 2, "fsdp": 4, "tensor": 1})
    assert "assumed" in grid.note and "pip install 'podling[tpu]'" in grid.note
    assert [cell.device for cell in grid.cells] == list(range(8))
    assert grid.cells[5].place == {"data": 1, "fsdp": 1, "tensor": 0} and grid.cells[5].coords == (1, 2, 0)
    assert legend(grid) == "same fsdp index (same colour): the same 1/4 of the state, on 2 devices"


def test_a_compiler_that_fails_is_told_and_not_fatal(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: True)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")  # the child then finds no podling, or no libtpu
    monkeypatch.setattr(topology.sys, "executable", "false")
    grid = grid_of_topology(parse_topology("v5e:2x4"), {"data": 8, "fsdp": 1, "tensor": 1})
    assert "assumed" in grid.note and "the TPU compiler failed" in grid.note
    with pytest.raises(RunError):
        placed(parse_topology("v5e:2x4"), {"data": 8, "fsdp": 1, "tensor": 1})


def test_the_environment_keeps_the_compiler_from_looking_for_a_tpu():
    assert compiler_environment()["JAX_PLATFORMS"] == "cpu" and compiler_environment()["TPU_SKIP_MDS_QUERY"] == "1"


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the TPU compiler: pip install 'podling[tpu]'")
@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:1x1", "v5e:4x4", "v4:2x2x2", "v3:2x2", "v5p:2x2x1"])
def test_our_numbering_is_the_compilers(name):
    parsed = parse_topology(name)
    found = placed(parsed, {"data": 1, "fsdp": parsed.devices, "tensor": 1})
    assert sorted(found, key=lambda cell: cell.id) == parsed.in_order()
    if name == "v5e:2x4":  # a ring of neighbours, not the order of ids
        assert [cell.id for cell in found] == [0, 1, 2, 3, 7, 6, 5, 4]


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the TPU compiler: pip install 'podling[tpu]'")
def test_slices_and_cores_that_work_as_one_device():
    code = """
from podling.topology import devices, parse_topology
for name, slices in (("v5e:2x4", 2), ("v4-8", 1), ("v5p-8", 1), ("v3-8", 1)):
    found = devices(parse_topology(name), slices)
    print(len(found), getattr(found[0], "slice_index", None) or 0, getattr(found[-1], "slice_index", None) or 0)
"""
    environment = {**os.environ, **compiler_environment()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["16 0 1", "4 0 0", "4 0 0", "8 0 0", ""], done.stderr


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the TPU compiler: pip install 'podling[tpu]'")
def test_slices_of_the_compiler_make_a_mesh():
    code = """
from podling.parallel.mesh import make_mesh
from podling.topology import devices, parse_topology
for name, mesh in (("v5e:2x2", "data=8"), ("v5e:16x16", "data=2,fsdp=256")):
    found = make_mesh(mesh, devices(parse_topology(name), 2))
    print(*dict.fromkeys(chip.slice_index for chip in found.devices.flat), len(found.devices))
"""
    environment = {**os.environ, **compiler_environment()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["0 1 8", "0 1 2", ""], done.stderr
