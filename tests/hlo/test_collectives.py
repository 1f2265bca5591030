"""Collectives of programs whose answer is known in closed form."""

import itertools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from podling.hlo.collectives import Collective, find_collectives, totals
from podling.hlo.program import read_program
from podling.hlo.text import Shape
from podling.parallel.mesh import make_mesh

HERE = Path(__file__).parent
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
AXES = [c for n in (1, 2, 3) for c in itertools.combinations(MESH, n)]
ROWS = 16  # of the piece on each device, 3 numbers a row


def collectives(f, text: str = "data=2,fsdp=2,tensor=2") -> list[Collective]:
    """Of `f` mapped over all devices, each with a piece f32[16, 3]."""
    mesh = make_mesh(text)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(f, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names), check_vma=False)
        whole = jax.ShapeDtypeStruct((ROWS * 8, 3), jnp.float32, sharding=jax.NamedSharding(mesh, P(mesh.axis_names)))
        compiled = jax.jit(mapped).lower(whole).compile()
    return find_collectives(read_program(compiled.as_text()), dict(mesh.shape))


def shape(rows: int) -> tuple[Shape, ...]:
    return (Shape("f32", (rows, 3)),)


@pytest.mark.parametrize("axes", AXES)
def test_one_collective_over_any_axes(axes: tuple[str, ...]):
    n, piece = 2 ** len(axes), ROWS * 3 * 4
    expected = {
        "all-reduce": (jax.lax.psum, ROWS, 2 * piece * (n - 1) // n),
        "all-gather": (partial(jax.lax.all_gather, tiled=True), ROWS * n, piece * (n - 1)),
        "reduce-scatter": (partial(jax.lax.psum_scatter, tiled=True), ROWS // n, piece * (n - 1) // n),
    }
    for kind, (f, rows, sent_bytes) in expected.items():
        (found,) = collectives(lambda x, f=f: f(x, axes))
        assert (found.kind, found.axes, found.group, found.times) == (kind, axes, n, 1)
        assert found.operands == shape(ROWS) and found.results == shape(rows)
        assert found.operand_bytes == piece and found.result_bytes == rows * 12
        assert found.sent_bytes == sent_bytes
        assert found.cut == (None,) and not found.asynchronous


@pytest.mark.parametrize("axis", MESH)
def test_exchanges(axis: str):
    (found,) = collectives(lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True))
    assert (found.kind, found.axes, found.group, found.times) == ("all-to-all", (axis,), 2, 1)
    assert found.operand_bytes == found.result_bytes == ROWS * 12
    assert found.sent_bytes == ROWS * 12 // 2
    (found,) = collectives(lambda x: jax.lax.ppermute(x, axis, [(0, 1), (1, 0)]))
    assert (found.kind, found.axes, found.times) == ("collective-permute", (axis,), 1)
    assert found.sent_bytes == found.operand_bytes == ROWS * 12


def test_loops_multiply_and_totals_add_up():
    def f(x):
        def inner(carry, _):
            with jax.named_scope("within"):
                return jnp.tanh(carry + jax.lax.psum(carry, "fsdp")), None

        def outer(carry, _):
            carry, _ = jax.lax.scan(inner, carry, None, length=5)
            return jax.lax.all_to_all(carry, "tensor", 0, 0, tiled=True), None

        y, _ = jax.lax.scan(outer, x, None, length=3)
        return jax.lax.psum(y, "fsdp")

    found = collectives(f)
    by_place = {(one.kind, "within" in one.op_name): one for one in found}
    assert len(found) == 3
    assert by_place["all-reduce", True].times == 15
    assert by_place["all-to-all", False].times == 3
    assert by_place["all-reduce", False].times == 1
    rows = {(row.kind, row.axes): row for row in totals(found)}
    reduced = rows["all-reduce", ("fsdp",)]
    assert (reduced.times, reduced.arrays, reduced.asynchronous) == (16, 16, 0)
    assert reduced.operand_bytes == 16 * ROWS * 12 == reduced.sent_bytes
    assert rows["all-to-all", ("tensor",)].times == 3


def test_one_collective_of_several_arrays():
    """The CPU compiler combines all-reduces that are independent of each other."""
    found = collectives(lambda x: jax.lax.psum(x, "data") + jnp.sum(jax.lax.psum(jnp.sin(x[:2]), "data")))
    assert sum(len(one.operands) for one in found) == 2
    assert sorted(shape.dims for one in found for shape in one.operands) == [(2, 3), (16, 3)]
    assert {one.axes for one in found} == {("data",)}


@pytest.mark.parametrize(("keep_whole", "cut"), [(False, Shape("f32", (8, 3))), (True, None)])
def test_an_all_reduce_of_which_a_slice_is_kept(keep_whole: bool, cut: Shape | None):
    def f(x):
        whole = jax.lax.psum(x, "fsdp")
        mine = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("fsdp") * 8, 8)
        return jnp.tanh(jnp.concatenate([mine, mine])) + (jnp.sin(whole) if keep_whole else 0.0)

    (found,) = collectives(f)
    assert found.kind == "all-reduce"
    assert found.cut == (cut,)


# pairs.hlo and chain.hlo were written for these tests, in the TPU compiler's spellings.


def test_start_and_done_are_one_asynchronous_collective():
    gather, reduce, permute = find_collectives(read_program((HERE / "pairs.hlo").read_text()), MESH)
    assert (gather.kind, gather.axes, gather.asynchronous) == ("all-gather", ("tensor",), True)
    assert (gather.operand_bytes, gather.result_bytes, gather.op_name) == (96, 192, "jit(f)/gather")
    assert (reduce.kind, reduce.axes, reduce.asynchronous) == ("all-reduce", ("data",), True)
    assert reduce.operand_bytes == reduce.result_bytes == 8
    assert (permute.kind, permute.axes, permute.asynchronous) == ("collective-permute", ("fsdp",), True)
    assert permute.result_bytes == 8
    assert gather.scheduled_in == "main" and gather.runs_in == ("all-gather-start", "all-gather-done")


def test_a_chain_of_fusions_is_one_asynchronous_gather_and_an_all_reduce_scatter_is_a_reduce_scatter():
    gather, scatter = find_collectives(read_program((HERE / "chain.hlo").read_text()), MESH)
    assert (gather.kind, gather.axes, gather.times, gather.asynchronous) == ("all-gather", ("tensor",), 1, True)
    assert (gather.operand_bytes, gather.result_bytes) == (48, 96)
    assert (scatter.kind, scatter.axes, scatter.times, scatter.asynchronous) == ("reduce-scatter", ("fsdp",), 1, False)
    assert (scatter.operand_bytes, scatter.result_bytes) == (96 + 16, 48 + 8)
    assert scatter.op_name == "jit(f)/dot"
    assert gather.scheduled_in == "main" and gather.runs_in == ("fusion.1", "fusion.2", "fusion.3")
    assert scatter.runs_in == ("fusion.4",)


def test_an_all_reduce_of_which_more_is_kept_than_a_slice_is_none():
    text = (HERE / "chain.hlo").read_text()
    whole = text.replace("dynamic-slice(%g.1, %zero, %zero), dynamic_slice_sizes={4,1}", "negate(%g.1)")
    assert whole != text
    _, reduce = find_collectives(read_program(whole), MESH)
    assert (reduce.kind, reduce.cut) == ("all-reduce", (Shape("bf16", (8, 3)), None))


KEPT = """\
HloModule m, num_partitions=8

%mine (p: f32[8]) -> f32[4] {
  %p = f32[8] parameter(0)
  %four = s32[] constant(4)
  ROOT %d = f32[4] dynamic-slice(%p, %four), dynamic_slice_sizes={4}
}

%all (p: f32[8]) -> f32[2,4] {
  %p = f32[8] parameter(0)
  ROOT %b = f32[2,4] bitcast(%p)
}

ENTRY %main (x: f32[8]) -> (f32[4], f32[2,4]) {
  %x = f32[8] parameter(0)
  %r = f32[8] all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  %f = f32[4] fusion(%r), kind=kLoop, calls=%mine
  %g = f32[2,4] fusion(%r), kind=kLoop, calls=%all
  ROOT %t = (f32[4], f32[2,4]) tuple(%f, %g)
}
"""


def test_a_value_that_a_fusion_gives_back_is_kept_whole():
    (found,) = find_collectives(read_program(KEPT), MESH)
    assert found.cut == (None,)
    (found,) = find_collectives(read_program(KEPT.replace("fusion(%r), kind=kLoop, calls=%all", "iota()")), MESH)
    assert found.cut == (Shape("f32", (4,)),)
