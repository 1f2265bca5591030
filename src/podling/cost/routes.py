"""How data goes round the devices of a group: over which links of the grid of chips, and shared with which groups.

Three ways are compared: handed on from each device to the next of its mesh axis; one axis of the grid after the other;
and, for a box of whole chips, all axes at once with a part of the data each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from types import SimpleNamespace

from podling.topology import Placed, Topology

Coords = tuple[int, int, int]
Link = tuple[Coords, Coords]
Group = list[Placed]


@dataclass(frozen=True)
class Route:
    """How the devices of one group, in one slice, reach one another."""

    devices: int
    streams: float  # links that a device's data goes over at once
    hops: float  # links that a message passes on its way round
    spread: float  # of an all-to-all: link's loads of what a device sends, over the fullest link


@dataclass(frozen=True)
class Grid:
    """Chips in a grid."""

    sides: Coords  # chips along x, y, z
    rings: tuple[bool, bool, bool]  # whether they close
    devices_per_chip: int

    def route(self, groups: list[Group]) -> Route:
        """The best way for groups of one size that all send at once, each group's devices in mesh order."""
        routes = [self._round(groups)]
        if by_axis := self._by_axis(groups):
            routes.append(by_axis)
        if all(map(self._is_box, groups)):
            routes.append(self._box(groups[0]))
        streams, hops, spread = (
            max(r.streams for r in routes),
            min(r.hops for r in routes),
            [r.spread for r in routes],
        )
        return Route(len(groups[0]), streams, hops, min(spread))

    def _round(self, groups: list[Group]) -> Route:
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

    def _by_axis(self, groups: list[Group]) -> Route | None:
        """One axis of the grid after the other, each time with the part that is left; None where there is no grid."""
        n, legs = len(groups[0]), []
        for axis in range(4):
            lines: dict[tuple[int, ...], Group] = {}
            for number, group in enumerate(groups):
                for device in sorted(group, key=_at):
                    others = _at(device)[:axis] + _at(device)[axis + 1 :]
                    lines.setdefault((number, *others), []).append(device)
            lengths = {len(line) for line in lines.values()}
            if len(lengths) > 1:
                return None
            legs.append((lengths.pop(), self._round(list(lines.values()))))
        if prod(length for length, _ in legs) != n:
            return None
        times = []
        for order in permutations(leg for leg in legs if leg[0] > 1):
            left, time = 1.0, 0.0
            for length, leg in order:
                time += left * (length - 1) / length / leg.streams
                left /= length
            times.append(time)
        fastest = min(times)
        streams = (n - 1) / n / fastest if fastest else float("inf")
        return Route(n, streams, sum(leg.hops for _, leg in legs), max(leg.spread for _, leg in legs))

    def _is_box(self, group: Group) -> bool:
        """Whether it is a box of neighbouring chips with all their devices."""
        chips = {device.coords for device in group}
        spans = [{chip[axis] for chip in chips} for axis in range(3)]
        tight = all(max(span) - min(span) + 1 == len(span) for span in spans)
        return tight and len(chips) == prod(map(len, spans)) and len(group) == len(chips) * self.devices_per_chip

    def _box(self, group: Group) -> Route:
        """Data cut in parts that go round the directions at the same time."""
        lengths = [len({device.coords[axis] for device in group}) for axis in range(3)]
        closed = [ring and length == side for ring, length, side in zip(self.rings, lengths, self.sides, strict=True)]
        streams, hops, spread = 0, 0.0, 0.0
        for length, ring in zip(lengths, closed, strict=True):
            if length > 1:
                streams += 2 if ring else 1
                hops += length / 2 if ring else length - 1
                cores = self.devices_per_chip
                spread = max(spread, cores * length / (8 if ring else 4))
        return Route(len(group), streams or float("inf"), hops, spread)


def arranged(topology: Topology, sizes: Mapping[str, int]) -> tuple[Placed, ...]:
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


def _at(device: Placed) -> tuple[int, int, int, int]:
    return (*device.coords, device.core)
