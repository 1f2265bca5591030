"""Which devices a collective brings together, in any of XLA's three spellings, and which mesh axes that crosses.

A number is a place in the program's device order, which for a program compiled under a mesh is the mesh's own:
the last axis turns fastest.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

Groups = list[tuple[int, ...]]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def read_groups(attributes: str, devices: int) -> Groups:
    """The groups in an instruction's attributes; none written means all `devices` together.

    Understands lists `{{0,1},{2,3}}`, iotas `[4,2]<=[2,4]T(1,0)`, meshes `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0))
    {'b'}` (a group is what varies along the axes in braces), and the `source_target_pairs` of a permute.
    """
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    written = pairs[1] if pairs else attributes.partition("replica_groups=")[2]
    if iota := _IOTA.match(written):
        shape, source, order = (_numbers(part) for part in iota.groups())
        ids = transposed_iota(source, order)
        width = math.prod(shape[1:])
        return [tuple(ids[start : start + width]) for start in range(0, len(ids), width)]
    if mesh := _MESH.match(written):
        return _along_axes(*mesh.groups())
    listed = re.match(r"\{?((?:\{[\d,]*\},?)+)\}?", written)
    groups = [tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else []
    return groups or [tuple(range(devices))]


def transposed_iota(shape: Sequence[int], order: Sequence[int] = ()) -> list[int]:
    """0, 1, 2, ... in the given shape, its axes reordered, flat."""
    order = order or range(len(shape))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    places = itertools.product(*(range(shape[axis]) for axis in order))
    return [sum(place * strides[axis] for place, axis in zip(at, order, strict=True)) for at in places]


def crossed_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which some group has more than one place."""
    sizes = list(mesh.values())
    crossed = set()
    for group in groups:
        places = [_place(device, sizes) for device in group]
        crossed |= {axis for axis, at in zip(mesh, zip(*places, strict=True), strict=True) if len(set(at)) > 1}
    return tuple(axis for axis in mesh if axis in crossed)


def _place(device: int, sizes: list[int]) -> list[int]:
    place = []
    for size in reversed(sizes):
        device, at = divmod(device, size)
        place.append(at)
    return place[::-1]


def _along_axes(axes: str, source: str | None, order: str | None, grouped: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    total = math.prod(sizes.values())
    ids = transposed_iota(_numbers(source), _numbers(order)) if source else list(range(total))
    # (factors before, size) of each grouped part within its axis; a whole axis is (1, its size).
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(grouped)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, device in enumerate(ids):
        rest = []
        for (name, size), at in zip(sizes.items(), _place(index, list(sizes.values())), strict=True):
            before, width = parts.get(name, (1, 1))
            after = size // (before * width)
            rest.append(at // (width * after) * after + at % after)
        groups.setdefault(tuple(rest), []).append(device)
    return [tuple(group) for group in groups.values()]


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",") if number] if text else []
