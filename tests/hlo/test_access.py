"""Bytes of device memory that instructions move: in VMEM nothing, of a stack one layer, updates in place."""

import pytest

from podling.hlo.access import hbm_bytes
from podling.hlo.program import read_program

PROGRAM = """\
HloModule m, is_scheduled=true

%slice_inside (p: f32[12,64], i: s32[]) -> f32[1,64] {
  %p = f32[12,64] parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %zero = s32[] constant(0)
  %bit = f32[12,64] bitcast(%p)
  ROOT %d = f32[1,64] dynamic-slice(%bit, %i, %zero), dynamic_slice_sizes={1,64}
}

%take (p: f32[12,64], i: s32[]) -> f32[1,64] {
  %p = f32[12,64] parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %inner = f32[1,64] fusion(%p, %i), kind=kLoop, calls=%slice_inside
  ROOT %t = f32[1,64] tanh(%inner)
}

%put (p: f32[12,64], u: f32[1,64], i: s32[]) -> (f32[12,64], f32[1,64]) {
  %p = f32[12,64] parameter(0)
  %u = f32[1,64] parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  %zero = s32[] constant(0)
  %e = f32[1,64] exponential(%u)
  %d = f32[12,64] dynamic-update-slice(%p, %e, %i, %zero)
  ROOT %t = (f32[12,64], f32[1,64]) tuple(%d, %e)
}

%rows (p: f32[100,64], i: s32[8]) -> f32[8,64] {
  %p = f32[100,64] parameter(0)
  %i = s32[8] parameter(1)
  ROOT %g = f32[8,64] gather(%p, %i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, slice_sizes={1,64}
}

%wrapped (p: f32[12,64]) -> f32[12,64] {
  %p = f32[12,64] parameter(0)
  ROOT %c = f32[12,64]{1,0:S(1)} copy(%p)
}

ENTRY %main (x: f32[12,64], y: f32[100,64], i: s32[], j: s32[8]) -> f32[12,64] {
  %x = f32[12,64]{1,0:T(8,128)} parameter(0)
  %y = f32[100,64]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  %j = s32[8]{0} parameter(3)
  %plain = f32[12,64] add(%x, %x)
  %near = f32[12,64]{1,0:T(8,128)S(1)} tanh(%plain)
  %nearer = f32[12,64]{1,0:T(8,128)S(1)} tanh(%near)
  %taken = f32[1,64]{1,0:T(8,128)} fusion(%x, %i), kind=kLoop, calls=%take
  %put = (f32[12,64]{1,0}, f32[1,64]{1,0:S(1)}) fusion(%x, %taken, %i), kind=kLoop, calls=%put
  %looked_up = f32[8,64] fusion(%y, %j), kind=kCustom, calls=%rows
  %copy-start = (f32[12,64]{1,0:S(1)}, f32[12,64]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = f32[12,64]{1,0:S(1)} copy-done(%copy-start)
  %slice-start = ((f32[100,64]{1,0}), f32[10,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%y), slice={[0:10], [0:64]}
  %slice-done = f32[10,64]{1,0:S(1)} slice-done(%slice-start)
  %between = (f32[10,64]{1,0}, f32[10,64]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%slice-done)
  %far = (f32[10,64]{1,0}, f32[10,64]{1,0}, u32[]{:S(2)}) copy-start(%slice-done)
  %wrap-start = ((f32[12,64]{1,0}), f32[12,64]{1,0:S(1)}, u32[]{:S(2)}) async-start(%x), calls=%wrapped
  %room = f32[12,64] custom-call(), custom_call_target="AllocateBuffer"
  %t = (f32[12,64], f32[12,64]) tuple(%x, %room)
  %near_updated = f32[12,64]{1,0:S(1)} dynamic-update-slice(%near, %taken, %i, %i)
  %added = f32[100,64]{1,0} scatter(%y, %j, %looked_up), update_window_dims={1}, to_apply=%sum
  ROOT %updated = f32[12,64] dynamic-update-slice(%x, %taken, %i, %i)
}
"""
STACK, LAYER = 12 * 64 * 4, 64 * 4


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [
        ("plain", 2 * STACK),  # one array read, though it is used twice, and one written
        ("near", STACK),  # its result stays in VMEM
        ("nearer", 0),
        ("taken", 2 * LAYER),  # one layer of the stack, through a fusion in the fusion
        ("put", 2 * LAYER),  # the update read and written; its second result stays in VMEM
        ("looked_up", 2 * 8 * LAYER + 8 * 4),  # rows and their numbers
        ("copy-start", STACK), ("copy-done", 0),
        ("slice-start", 10 * LAYER),
        ("between", 10 * LAYER),
        ("far", 2 * 10 * LAYER),  # from one place in memory to another
        ("wrap-start", STACK),
        ("room", 0), ("t", 0), ("x", 0),
        ("updated", 2 * LAYER),
        ("near_updated", LAYER),  # the update is read, and written to VMEM
        ("added", 3 * 8 * LAYER + 8 * 4),  # rows that are added: read; rows added to: read and written
    ],
)  # fmt: skip
def test_bytes_moved(name: str, size_bytes: int):
    program = read_program(PROGRAM)
    assert hbm_bytes(program, "main", program.computations["main"][name]) == size_bytes


def test_an_operand_that_a_fusion_also_uses_whole_is_read_whole():
    text = PROGRAM.replace(
        "ROOT %t = f32[1,64] tanh(%inner)", "%n = f32[12,64] negate(%p)\n  ROOT %t = f32[1,64] x(%n)"
    )
    program = read_program(text)
    assert hbm_bytes(program, "main", program.computations["main"]["taken"]) == STACK + LAYER
