"""The devices of a mesh, each with its place on the machine and on the axes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from jax.sharding import Mesh

from podling.errors import RunError
from podling.parallel.axes import MESH_AXES
from podling.topology import Topology, compiler_missing, placed


@dataclass(frozen=True)
class Cell:
    """One device."""

    device: int
    coords: tuple[int, int, int] | None
    """Of its chip; None where devices have none."""
    core: int
    process: int
    place: dict[str, int]
    """Its index on data, fsdp and tensor."""


@dataclass(frozen=True)
class Grid:
    """All devices of a mesh, in mesh order."""

    kind: str
    sizes: dict[str, int]
    cells: tuple[Cell, ...]
    note: str
    """Where the arrangement comes from."""

    def record(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def grid_of_devices(mesh: Mesh) -> Grid:
    """The real devices of this machine (or of all processes), as `parallel.mesh.make_mesh` arranged them."""
    cells = [
        Cell(
            chip.id,
            tuple(getattr(chip, "coords", ())) or None,
            getattr(chip, "core_on_chip", 0),
            chip.process_index,
            place,
        )
        for chip, place in zip(mesh.devices.flat, _places(mesh.shape), strict=True)
    ]
    return Grid(mesh.devices.flat[0].device_kind, dict(mesh.shape), tuple(cells), "the devices JAX finds here")


def grid_of_topology(topology: Topology, sizes: Mapping[str, int]) -> Grid:
    """A topology's devices: in the compiler's own arrangement where libtpu is installed, else in order of their ids."""
    missing = compiler_missing()
    where = topology.in_order()
    if missing is None:
        try:
            where = placed(topology, sizes)
            note = "arranged as jax.make_mesh arranges the TPU compiler's devices"
        except RunError as error:
            note = f"assumed arrangement, in order of device ids: {error.problems[0].what}"
    else:
        note = f"assumed arrangement, in order of device ids; for the real one: {missing}"
    cells = [
        Cell(chip.id, chip.coords, chip.core, chip.process, place)
        for chip, place in zip(where, _places(sizes), strict=True)
    ]
    return Grid(topology.chip.device_kind, dict(sizes), tuple(cells), note)


def grid_of_count(devices: int, sizes: Mapping[str, int]) -> Grid:
    """Devices of which only the number is known."""
    cells = [Cell(index, None, 0, 0, place) for index, place in zip(range(devices), _places(sizes), strict=True)]
    return Grid("device", dict(sizes), tuple(cells), "in order, as many as --devices asked for")


def planes(grid: Grid) -> list[int | None]:
    """The z coordinates that chips have, each a plane to draw; one None where devices have no coordinates."""
    return [*sorted({cell.coords[2] for cell in grid.cells if cell.coords})] or [None]


def plane_rows(grid: Grid, z: int | None, columns: int = 8) -> list[list[Cell]]:
    """The devices of a plane, row by row: y down, x and core to the right; in mesh order where they have no place."""
    if z is None:
        return [list(grid.cells[start : start + columns]) for start in range(0, len(grid.cells), columns)]
    rows: dict[int, list[Cell]] = {}
    for cell in sorted(grid.cells, key=lambda cell: (cell.coords or (), cell.core)):
        if cell.coords and cell.coords[2] == z:
            rows.setdefault(cell.coords[1], []).append(cell)
    return [rows[y] for y in sorted(rows)]


def directions(grid: Grid, planes_drawn: Sequence[Sequence[Sequence[Cell]]]) -> str:
    """Which way each axis of more than one device runs, in a drawing of planes of rows of cells."""
    at = {
        tuple(cell.place.values()): (column, row, plane)
        for plane, rows in enumerate(planes_drawn)
        for row, cells in enumerate(rows)
        for column, cell in enumerate(cells)
    }
    names = list(grid.cells[0].place)
    said: list[str] = []
    for index, axis in enumerate(names):
        lines: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for place, where in at.items():
            lines.setdefault(place[:index] + place[index + 1 :], []).append(where)
        moves = {way for line in lines.values() for way in range(3) if len({where[way] for where in line}) > 1}
        if moves:
            words = ("to the right", "down", "from plane to plane")
            said.append(f"{axis} runs {' and '.join(words[way] for way in sorted(moves))}")
    return "; ".join(said)


def live_axes(grid: Grid) -> list[str]:
    """The axes of more than one device."""
    return [axis for axis, size in grid.sizes.items() if size > 1]


def state_part(cell: Cell, grid: Grid) -> int:
    """Which part of the state a device holds: devices with the same number hold the same bytes."""
    return cell.place["fsdp"] * grid.sizes["tensor"] + cell.place["tensor"]


def legend(grid: Grid) -> str:
    """Which devices hold the same part of the state, and so have the same colour."""
    parts = grid.sizes["fsdp"] * grid.sizes["tensor"]
    if parts == 1:
        return "every device holds the whole state" if len(grid.cells) > 1 else "the device holds the whole state"
    split = " and ".join(f"{axis} index" for axis in ("fsdp", "tensor") if grid.sizes[axis] > 1)
    copies = len(grid.cells) // parts
    if copies == 1:
        return f"every device holds its own 1/{parts} of the state"
    return f"same {split} (same colour): the same 1/{parts} of the state, on {copies} devices"


def _places(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    places = product(*(range(sizes[axis]) for axis in MESH_AXES))
    return [dict(zip(MESH_AXES, place, strict=True)) for place in places]
