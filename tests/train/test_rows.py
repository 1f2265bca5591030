"""Rows of a global batch find their devices; what the devices hold together can be compared with what they should."""

import jax
import numpy as np
import pytest

from podling.parallel.mesh import batch_sharding, make_mesh
from podling.train.rows import checksum, device_checksum, place, rows_here

TOKENS = np.random.default_rng(0).integers(0, 50_000, (2, 16, 12)).astype(np.int32)


@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2", "tensor=8"])
def test_rows_lie_where_the_sharding_says_and_add_up(mesh):
    grid = make_mesh(mesh)
    sharding = batch_sharding(grid, "micro", "batch", "sequence")
    assert rows_here(sharding, 16, axis=1) == list(range(16))  # this process holds all devices
    with jax.set_mesh(grid):
        placed = place((TOKENS, TOKENS + 1), sharding, 16, axis=1)
        assert device_checksum(placed[0]) == checksum(TOKENS)
        assert device_checksum(placed[1]) == checksum(TOKENS + 1) != checksum(TOKENS)
    for piece in placed[0].addressable_shards:
        np.testing.assert_array_equal(piece.data, TOKENS[piece.index])


class TwoOfFour:
    """A sharding of sixteen rows over four processes' devices, of which this one has two that are not neighbours."""

    spec = (None, "data", None)

    def addressable_devices_indices_map(self, shape):
        assert shape == (1, 16, 1)
        rows = {"first": slice(4, 8), "replica of it": slice(4, 8), "second": slice(12, 16)}
        return {device: (slice(None), part, slice(None)) for device, part in rows.items()}


def test_the_rows_of_a_process_are_those_of_its_devices_once_each():
    assert rows_here(TwoOfFour(), 16, axis=1) == [4, 5, 6, 7, 12, 13, 14, 15]


def test_the_checksum_sees_rows_and_tokens_that_change_places():
    swapped, moved, doubled = TOKENS.copy(), TOKENS.copy(), TOKENS.copy()
    swapped[0, [3, 4]] = swapped[0, [4, 3]]
    moved[[0, 1]] = moved[[1, 0]]
    doubled[0, 5] = doubled[0, 6]
    assert len({int(checksum(tokens)) for tokens in (TOKENS, swapped, moved, doubled, TOKENS[:, :, ::-1])}) == 5
