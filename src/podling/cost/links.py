"""How long a collective takes: its bytes over the links that join the devices of a mesh.

The devices along a mesh axis pass their data round. How fast that goes follows from where the mesh puts them: a ring
of neighbours moves data both ways at once, a line half of that, a whole plane uses the links of both directions; groups
whose ways cross share links. Algorithms and their bytes: Chan et al. 2007 (rings); Austin et al. 2025, "How to Scale
Your Model" (tori, all-to-all, and about a microsecond for each link that a message passes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from podling.chips import Chip
from podling.cost.routes import Grid, Route, arranged
from podling.errors import InputError, Problem
from podling.hlo.collectives import Collective
from podling.topology import Placed, Topology, parse_topology

HOP_S = 1e-6
DIRECT = ("all-to-all", "ragged-all-to-all", "collective-permute")
"""Kinds in which every byte has one place to go to."""
NO_RINGS = (False, False, False)


@dataclass(frozen=True)
class Links:
    """The links of a mesh's devices."""

    chip: Chip
    sizes: dict[str, int]  # of the mesh within one slice
    slices: int
    places: tuple[Placed, ...]  # of that mesh's devices, in its order; empty where a switch joins them
    grid: Grid

    def seconds(self, kind: str, axes: Sequence[str], operand_bytes: int, result_bytes: int) -> float:
        """Time of one collective with nothing else on the links.

        Args:
            kind: XLA's name.
            axes: mesh axes that it crosses.
            operand_bytes: what a device puts in.
            result_bytes: what it gets out.
        """
        across = self.slices if self.slices > 1 and self._outer in axes else 1
        route = self._route(tuple(axis for axis in axes if self.sizes[axis] > 1))
        direct = kind in DIRECT
        total = self._within(route, kind, operand_bytes / (across if direct else 1), result_bytes)
        if across > 1:  # the rest of the way goes through the data centre, for each device with its own part
            ways = 2 if kind == "all-reduce" else 1
            part = operand_bytes if direct else max(operand_bytes, result_bytes) / route.devices
            total += ways * part * (across - 1) / across / self.chip.between_slices_bytes_per_s
        return total

    def of(self, one: Collective) -> float:
        """Time of a collective of a program, once."""
        return self.seconds(one.kind, one.axes, one.operand_bytes, one.result_bytes)

    @property
    def _outer(self) -> str:
        return next(iter(self.sizes))

    def _within(self, route: Route, kind: str, operand_bytes: float, result_bytes: float) -> float:
        n, speed = route.devices, self.chip.link_bytes_per_s
        if n == 1:
            return 0.0
        if kind in ("all-to-all", "ragged-all-to-all"):
            return operand_bytes * route.spread / speed + route.hops * HOP_S
        if kind == "collective-permute":
            return operand_bytes / speed + HOP_S
        ways = 2 if kind == "all-reduce" else 1
        whole = result_bytes if kind == "all-gather" else operand_bytes
        return ways * (whole * (n - 1) / n / (route.streams * speed) + route.hops * HOP_S)

    @cached_property
    def _routes(self) -> dict[tuple[str, ...], Route]:
        return {}

    def _route(self, axes: tuple[str, ...]) -> Route:
        if axes not in self._routes:
            self._routes[axes] = self._find_route(axes)
        return self._routes[axes]

    def _find_route(self, axes: tuple[str, ...]) -> Route:
        n = prod(self.sizes[axis] for axis in axes)
        if n == 1:
            return Route(1, 1, 0, 0)
        if not self.places:
            return Route(n, self.chip.links, 2, (n - 1) / n / self.chip.links)
        return self.grid.route(self._groups(axes))

    def _groups(self, axes: tuple[str, ...]) -> list[list[Placed]]:
        """The devices that go together along these axes."""
        groups: dict[tuple[int, ...], list[Placed]] = {}
        at = product(*(range(size) for size in self.sizes.values()))
        for place, device in zip(at, self.places, strict=True):
            fixed = tuple(index for axis, index in zip(self.sizes, place, strict=True) if axis not in axes)
            groups.setdefault(fixed, []).append(device)
        return list(groups.values())


def join(chip: Chip, mesh: Mapping[str, int], topology: Topology | None = None, slices: int = 1) -> Links:
    """The links between a mesh's devices.

    Args:
        chip: what is joined.
        mesh: axes and sizes, in order, over all slices.
        topology: of one slice; None for the one that the cloud has with so many chips, or a line of them.
        slices: joined by the data centre's network along the first axis.

    Raises:
        InputError: the mesh is of another size, or its first axis does not go over the slices.
    """
    sizes = dict(mesh)
    outer = next(iter(sizes))
    if sizes[outer] % slices:
        what = f"{slices} slices go along {outer}, and {outer}={sizes[outer]} is no multiple of {slices}"
        raise InputError(Problem("--mesh", what))
    sizes[outer] //= slices
    devices = prod(sizes.values())
    if not chip.dims:
        return Links(chip, sizes, slices, (), Grid((1, 1, 1), NO_RINGS, 1))
    if topology is None:
        topology = _usual(chip, devices)
    if topology is None:
        line = tuple(Placed(number, (number, 0, 0), 0, 0) for number in range(devices))
        return Links(chip, sizes, slices, line, Grid((devices, 1, 1), NO_RINGS, 1))
    if topology.devices != devices:
        what = f"{mesh} is of {devices * slices} devices, and {topology.name} has {topology.devices}"
        raise InputError(Problem("--mesh", what + (f", {slices} times" if slices > 1 else "")))
    x, y, z = (*topology.shape, 1)[:3]
    a, b, c = (*topology.rings, False)[:3]
    grid = Grid((x, y, z), (a, b, c), chip.devices_per_chip)
    return Links(chip, sizes, slices, arranged(topology, sizes), grid)


def _usual(chip: Chip, devices: int) -> Topology | None:
    try:
        return parse_topology(f"{chip.name}-{devices * chip.cores // chip.devices_per_chip}")
    except InputError:
        return None
