"""Replica groups in every spelling, against NumPy."""

import itertools

import numpy as np
import pytest

from podling.hlo.groups import crossed_axes, read_groups

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def rows(array: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(x) for x in row) for row in array]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", [(0, 1), (2, 3)]),
        ("channel_id=1, replica_groups={{0,2,1,3}}", [(0, 2, 1, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("channel_id=1", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("source_target_pairs={{0,1},{1,0},{6,7}}, channel_id=2", [(0, 1), (1, 0), (6, 7)]),
        ("replica_groups=[4,2]<=[8], to_apply=%add", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=[8]<=[8]", [(n,) for n in range(8)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={1}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", [tuple(range(8))]),
        ("replica_groups=mesh['a'=1,'b'=8] {'b':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ],
)
def test_groups_read_as_written(written: str, expected: list[tuple[int, ...]]):
    assert read_groups(written, 8) == expected


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_iota_is_a_transposed_arange(order: tuple[int, ...]):
    ids = np.arange(24).reshape(2, 3, 4).transpose(order).reshape(-1)
    text = f"replica_groups=[6,4]<=[2,3,4]T({','.join(map(str, order))})"
    assert read_groups(text, 24) == rows(ids.reshape(6, 4))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("axis", [0, 1])
def test_a_mesh_with_reordered_devices(order: tuple[int, ...], axis: int):
    ids = np.arange(24).reshape(2, 3, 4).transpose(order).reshape(4, 6)
    text = f"replica_groups=mesh['a'=4,'b'=6], device_ids=([2,3,4]T({','.join(map(str, order))})) {{'{'ab'[axis]}'}}"
    assert read_groups(text, 24) == rows(np.moveaxis(ids, axis, 1))


@pytest.mark.parametrize("axes", [c for n in (1, 2, 3) for c in itertools.combinations(MESH, n)])
def test_axes_that_a_group_crosses(axes: tuple[str, ...]):
    ids = np.arange(8).reshape(2, 2, 2)
    kept = [axis for axis in range(3) if list(MESH)[axis] not in axes]
    moved = np.moveaxis(ids, kept, range(len(kept))).reshape(2 ** len(kept), -1)
    assert crossed_axes(rows(moved), MESH) == axes
    assert crossed_axes(rows(moved)[:1], MESH) == axes


def test_axes_of_one_device_are_never_crossed():
    assert crossed_axes([(0, 1, 2, 3)], {"data": 1, "fsdp": 4, "tensor": 1}) == ("fsdp",)
    assert crossed_axes([(0,), (1,)], MESH) == ()
