"""Which device is where, and which devices share a part of the state."""

import jax
import pytest

from podling.layout.grid import grid_of_devices, plane_rows, planes, state_part
from podling.parallel.mesh import make_mesh, storage_sharding


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4", "data=4,tensor=2"])
def test_devices_of_one_part_hold_the_same_indices_of_a_kernel(mesh):
    """Against what JAX itself says of a parameter split over both axes."""
    built = make_mesh(mesh)
    held = storage_sharding(built, ("embed", "mlp")).devices_indices_map((16, 32))
    grid = grid_of_devices(built)
    part = {cell.device: state_part(cell, grid) for cell in grid.cells}
    for one in jax.devices():
        for other in jax.devices():
            assert (part[one.id] == part[other.id]) == (held[one] == held[other]), (one, other)
    assert set(part.values()) == set(range(built.shape["fsdp"] * built.shape["tensor"]))


def test_cells_carry_their_place_on_the_mesh():
    built = make_mesh("data=2,fsdp=2,tensor=2")
    grid = grid_of_devices(built)
    for cell in grid.cells:
        place = (cell.place["data"], cell.place["fsdp"], cell.place["tensor"])
        assert built.devices[place].id == cell.device and cell.process == 0
    assert planes(grid) == [None] and [len(row) for row in plane_rows(grid, None, columns=3)] == [3, 3, 2]
