"""How long a collective takes: its bytes over the links that join the devices of a mesh.

The devices along a mesh axis pass their data round. How fast that goes follows from where the mesh puts them: a ring
of neighbours moves data both ways at once, a line half of that, a whole plane uses the links of both directions; groups
whose ways cross share links. Algorithms and their bytes: Chan et al. 2007 (rings); Austin et al. 2025, "How to Scale
Your Model" (tori, all-to-all, and about a microsecond for each link that a message passes).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from types import SimpleNamespace

from podling.chips import Chip
from podling.errors import InputError, Problem
from podling.hlo.collectives import Collective
from podling.topology import Placed, Topology, parse_topology

HOP_S = 1e-6
DIRECT = ("all-to-all", "ragged-all-to-all", "collective-permute")
"""Kinds in which every byte has one place to go to."""
NO_RINGS = (False, False, False)
Coords = tuple[int, int, int]
Link = tuple[Coords, Coords]


@dataclass(frozen=True)
class Route:
    """How the devices of one group, in one slice, reach one another."""

    devices: int
    streams: float  # links that a device's data goes over at once
    hops: float  # links that a message passes on its way round
    spread: float  # of an all-to-all: link's loads of what a device sends, over the fullest link


@dataclass(frozen=True)
class Links:
    """The links of a mesh's devices."""

    chip: Chip
    sizes: dict[str, int]  # of the mesh within one slice
    slices: int
    places: tuple[Placed, ...]  # of that mesh's devices, in its order; empty where a switch joins them
    sides: tuple[int, int, int]  # chips along x, y, z
    rings: tuple[bool, bool, bool]  # whether they close

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
        groups = self._groups(axes)
        routes = [self._round(groups), self._round([sorted(group, key=_snake) for group in groups])]
        whole = self._torus(groups[0]) if all(map(self._is_torus, groups)) else None
        if whole:
            routes.append(whole)
        return Route(
            n, max(r.streams for r in routes), min(r.hops for r in routes), min(r.spread for r in routes)
        )  # fmt: skip

    def _groups(self, axes: tuple[str, ...]) -> list[list[Placed]]:
        """The devices that go together along these axes."""
        groups: dict[tuple[int, ...], list[Placed]] = {}
        at = product(*(range(size) for size in self.sizes.values()))
        for place, device in zip(at, self.places, strict=True):
            fixed = tuple(index for axis, index in zip(self.sizes, place, strict=True) if axis not in axes)
            groups.setdefault(fixed, []).append(device)
        return list(groups.values())

    def _round(self, groups: list[list[Placed]]) -> Route:
        """All groups at once, each handing on round its members in this order, half of it each way."""
        loads: dict[Link, int] = {}
        longest = 0
        for group in groups:
            length = 0
            for one, following in zip(group, group[1:] + group[:1], strict=True):
                for a, b in self._way(one.coords, following.coords):
                    length += 1
                    for link in ((a, b), (b, a)):
                        loads[link] = loads.get(link, 0) + 1
            longest = max(longest, length)
        n = len(groups[0])
        # A pair's ring is there and back over the same link: both directions at once, and that is counted twice.
        load = max(loads.values(), default=0) / (2 if n == 2 else 1)
        if not load:  # cores of one chip
            return Route(n, float("inf"), 0, 0)
        return Route(n, (1 if n == 2 else 2) / load, longest / 2, n * load / (4 if n == 2 else 8))

    def _way(self, start: Coords, end: Coords) -> Iterator[Link]:
        """The links from chip to chip: along x, then y, then z, the shorter way round where there is a ring."""
        at = list(start)
        for axis, (side, closed) in enumerate(zip(self.sides, self.rings, strict=True)):
            apart = end[axis] - at[axis]
            if closed and abs(apart) > side / 2:
                apart -= side if apart > 0 else -side
            for _ in range(abs(apart)):
                before = (at[0], at[1], at[2])
                at[axis] = (at[axis] + (1 if apart > 0 else -1)) % side
                yield before, (at[0], at[1], at[2])

    def _is_torus(self, group: list[Placed]) -> bool:
        """Whether it is a box of neighbouring chips with all their devices."""
        chips = {device.coords for device in group}
        spans = [{chip[axis] for chip in chips} for axis in range(3)]
        tight = all(max(span) - min(span) + 1 == len(span) for span in spans)
        return tight and len(chips) == prod(map(len, spans)) and len(group) == len(chips) * self.chip.devices_per_chip

    def _torus(self, group: list[Placed]) -> Route:
        """Data cut in parts that go round the directions at the same time."""
        lengths = [len({device.coords[axis] for device in group}) for axis in range(3)]
        closed = [ring and length == side for ring, length, side in zip(self.rings, lengths, self.sides, strict=True)]
        streams, hops, spread = 0, 0.0, 0.0
        for length, ring in zip(lengths, closed, strict=True):
            if length > 1:
                streams += 2 if ring else 1
                hops += length / 2 if ring else length - 1
                cores = self.chip.devices_per_chip
                spread = max(spread, cores * length / (8 if ring else 4))
        return Route(len(group), streams or float("inf"), hops, spread)


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
        return Links(chip, sizes, slices, (), (1, 1, 1), NO_RINGS)
    if topology is None:
        topology = _usual(chip, devices)
    if topology is None:
        line = tuple(Placed(number, (number, 0, 0), 0, 0) for number in range(devices))
        return Links(chip, sizes, slices, line, (devices, 1, 1), NO_RINGS)
    if topology.devices != devices:
        what = f"{mesh} is of {devices * slices} devices, and {topology.name} has {topology.devices}"
        raise InputError(Problem("--mesh", what + (f", {slices} times" if slices > 1 else "")))
    x, y, z = (*topology.shape, 1)[:3]
    a, b, c = (*topology.rings, False)[:3]
    return Links(chip, sizes, slices, _arranged(topology, sizes), (x, y, z), (a, b, c))


def _usual(chip: Chip, devices: int) -> Topology | None:
    try:
        return parse_topology(f"{chip.name}-{devices * chip.cores // chip.devices_per_chip}")
    except InputError:
        return None


def _arranged(topology: Topology, sizes: Mapping[str, int]) -> tuple[Placed, ...]:
    """The devices as `jax.make_mesh` lays them over the axes; where it cannot, in order of their ids."""
    if topology.devices == 1:
        return tuple(topology.in_order())
    from jax.experimental import mesh_utils

    stand_ins = [
        SimpleNamespace(
            coords=one.coords, core_on_chip=one.core, process_index=one.process, platform="tpu", slice_index=0,
            device_kind=topology.chip.device_kind, placed=one,
        )
        for one in topology.in_order()
    ]  # fmt: skip
    try:
        arranged = mesh_utils.create_device_mesh(
            tuple(sizes.values()), stand_ins, allow_split_physical_axes=topology.kind == "v5e"
        )
    except NotImplementedError:
        return tuple(topology.in_order())
    return tuple(device.placed for device in arranged.flat)


def _snake(device: Placed) -> tuple[int, ...]:
    """There and back along x, row after row."""
    x, y, z = device.coords
    y_turned = y if z % 2 == 0 else -y
    return (z, y_turned, x if y % 2 == 0 else -x, device.core)
