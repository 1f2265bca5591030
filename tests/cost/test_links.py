"""Seconds of collectives, against what is known in closed form of lines, rings, planes and shared links."""

import dataclasses

import pytest

from podling.chips import CHIPS
from podling.cost.links import HOP_S, Links, join
from podling.cost.routes import Grid
from podling.errors import InputError
from podling.topology import Topology, compiler_missing, parse_topology, placed

W = 50e9
V5E = dataclasses.replace(CHIPS["v5e"], link_bytes_per_s=W, between_slices_bytes_per_s=2e9)
MIB = 2**20


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> dict[str, int]:
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


def on(name: str, sizes: dict[str, int], slices: int = 1) -> Links:
    return join(V5E, sizes, parse_topology(name), slices)


def reduced(links: Links, axes: tuple[str, ...], size_bytes: int = MIB) -> float:
    return links.seconds("all-reduce", axes, size_bytes, size_bytes)


def test_a_ring_moves_data_both_ways():
    ring = on("v5e:16x16", mesh(data=16, fsdp=16))
    for axis in ("data", "fsdp"):
        whole = 16 * MIB
        gathered = ring.seconds("all-gather", (axis,), MIB, whole)
        assert gathered == pytest.approx(15 / 16 * whole / (2 * W) + 8 * HOP_S)
        assert ring.seconds("reduce-scatter", (axis,), whole, MIB) == pytest.approx(gathered)
        assert reduced(ring, (axis,), whole) == pytest.approx(2 * gathered)


def test_a_whole_torus_uses_four_links():
    both = on("v5e:16x16", mesh(data=16, fsdp=16))
    one = on("v5e:16x16", mesh(data=256))
    expected = 2 * (255 / 256 * MIB / (4 * W) + 16 * HOP_S)
    assert reduced(both, ("data", "fsdp")) == pytest.approx(expected)
    assert reduced(one, ("data",)) == pytest.approx(expected)


def test_a_plane_without_rings_has_two_links_at_a_corner():
    links = on("v5e:2x4", mesh(data=8))
    assert reduced(links, ("data",)) == pytest.approx(2 * (7 / 8 * MIB / (2 * W) + 4 * HOP_S))


def test_a_line_has_one_way_less():
    # The four chips of one column of 2 x 4, when the axis of two lies across.
    line = Links(V5E, mesh(data=4), 1, tuple(Topology("v5e", (4, 1)).in_order()), Grid((4, 1, 1), (False,) * 3, 1))
    assert reduced(line, ("data",)) == pytest.approx(2 * (3 / 4 * MIB / W + 3 * HOP_S))


def test_neighbours_have_the_link_between_them():
    pair = on("v5e:2x4", mesh(fsdp=4, tensor=2))
    assert pair.seconds("all-gather", ("tensor",), MIB, 2 * MIB) == pytest.approx(MIB / W + HOP_S)


def test_groups_that_cross_share_links():
    # Along x every second chip is in the same group: both groups' rings go over the same links.
    chips = Topology("v5e", (16, 1)).in_order()
    apart = Links(V5E, mesh(data=8, fsdp=2), 1, tuple(chips), Grid((16, 1, 1), (True, False, False), 1))
    together = Links(V5E, mesh(data=2, fsdp=8), 1, tuple(chips), Grid((16, 1, 1), (True, False, False), 1))
    gathered = apart.seconds("all-gather", ("data",), MIB, 8 * MIB)
    assert gathered == pytest.approx(7 * MIB / W + 8 * HOP_S)  # 2 ways, shared by 2
    assert together.seconds("all-gather", ("fsdp",), MIB, 8 * MIB) == pytest.approx(7 * MIB / W + 7 * HOP_S)  # a line


def test_pairs_apart_share_the_links_between_them():
    line = Links(
        V5E, mesh(data=2, fsdp=2), 1, tuple(Topology("v5e", (4, 1)).in_order()), Grid((4, 1, 1), (False,) * 3, 1)
    )
    assert line.seconds("all-gather", ("data",), MIB, 2 * MIB) == pytest.approx(2 * MIB / W + 2 * HOP_S)


def test_most_of_the_data_goes_along_the_axis_that_is_fast():
    # data=32 on 16 x 16: a ring of 16 along y, whole; then a sixteenth of it across half of x, where 8 groups share.
    links = on("v5e:16x16", mesh(data=32, fsdp=8))
    gathered = links.seconds("all-gather", ("data",), MIB, 32 * MIB)
    assert gathered == pytest.approx(32 * MIB * (15 / 16 / (2 * W) + 1 / 16 / 2 * 8 / W) + 16 * HOP_S)


def test_an_all_to_all_is_bound_by_the_cut_through_the_middle():
    # Half of 16 devices send half of what they have over the two links of a ring's cut, each way.
    links = on("v5e:16x16", mesh(data=16, fsdp=16))
    assert links.seconds("all-to-all", ("fsdp",), MIB, MIB) == pytest.approx(8 * MIB / 2 / 2 / W + 8 * HOP_S)
    # 2 x 4: 4 devices send half of theirs over two links, one way each.
    small = on("v5e:2x4", mesh(fsdp=8))
    assert small.seconds("all-to-all", ("fsdp",), MIB, MIB) == pytest.approx(4 * MIB / 2 / 2 / W + 4 * HOP_S)


def test_a_permutation_sends_all_to_a_neighbour():
    links = on("v5e:2x4", mesh(fsdp=8))
    assert links.seconds("collective-permute", ("fsdp",), MIB, MIB) == pytest.approx(MIB / W + HOP_S)


def test_cores_of_one_chip_need_no_link():
    v3 = dataclasses.replace(CHIPS["v3"], link_bytes_per_s=W)
    links = join(v3, mesh(data=4, fsdp=2), parse_topology("v3:2x2"))
    assert links.seconds("all-gather", ("fsdp",), MIB, 2 * MIB) == 0
    # Four chips in a ring; the two groups, one of each core, share its links.
    assert reduced(links, ("data",)) == pytest.approx(2 * (3 / 4 * MIB / W + 2 * HOP_S))


def test_slices_meet_in_the_data_centre():
    links = on("v5e:2x4", mesh(data=2, fsdp=8), slices=2)
    # An all-reduce over both: each device takes its eighth to the other slice and back.
    within = 2 * (7 / 8 * MIB / (2 * W) + 4 * HOP_S)
    assert reduced(links, ("data", "fsdp")) == pytest.approx(within + 2 * (MIB / 8) / 2 / 2e9)
    assert reduced(links, ("data",)) == pytest.approx(2 * MIB / 2 / 2e9)
    assert reduced(links, ("fsdp",)) == pytest.approx(within)
    # Half of what is exchanged stays in the slice.
    exchanged = links.seconds("all-to-all", ("data", "fsdp"), MIB, MIB)
    assert exchanged == pytest.approx(MIB / 2 * 4 / 2 / 2 / W + 4 * HOP_S + MIB / 2 / 2e9)


def test_a_switch_takes_all_links_of_a_card():
    h100 = dataclasses.replace(CHIPS["h100"], links=18, link_bytes_per_s=25e9)
    links = join(h100, mesh(data=8))
    assert reduced(links, ("data",)) == pytest.approx(2 * (7 / 8 * MIB / 450e9 + 2 * HOP_S))


def test_nothing_is_sent_where_there_is_one_device():
    assert reduced(on("v5e:1x1", mesh()), ()) == 0


def test_the_usual_topology_is_taken_where_none_is_given():
    assert reduced(join(V5E, mesh(data=8)), ("data",)) == reduced(on("v5e:2x4", mesh(data=8)), ("data",))
    three = join(V5E, mesh(data=3))  # no cloud has three: a line
    assert reduced(three, ("data",)) == pytest.approx(2 * (2 / 3 * MIB / W + 2 * HOP_S))


@pytest.mark.parametrize(
    ("sizes", "slices", "said"),
    [(mesh(data=4), 1, "v5e:2x4 has 8"), (mesh(data=1, fsdp=16), 2, "data=1 is no multiple")],
)
def test_a_mesh_of_another_size_is_refused(sizes, slices: int, said: str):
    with pytest.raises(InputError, match=said):
        on("v5e:2x4", sizes, slices)


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the TPU compiler: pip install 'podling[tpu]'")
@pytest.mark.parametrize("sizes", [mesh(data=8), mesh(fsdp=4, tensor=2)])
def test_devices_are_where_jax_puts_them(sizes):
    topology = parse_topology("v5e:2x4")
    assert [one.coords for one in on("v5e:2x4", sizes).places] == [one.coords for one in placed(topology, sizes)]
