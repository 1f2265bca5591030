"""Reading HLO text: what XLA prints on either platform, and what is no HLO."""

import jax
import jax.numpy as jnp
import pytest

from podling.errors import RunError
from podling.hlo.program import read_program
from podling.hlo.text import Shape, parse, read_shapes, root

# Written for this test in the spelling of the TPU compiler: tiled layouts, comments, strings with brackets, no
# %-signs lost, estimated cycles.
TPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%inner (p.0: bf16[8,128], p.1: s32[]) -> bf16[8,128] {
  %p.0 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  ROOT %convert.5 = bf16[8,128]{1,0:T(8,128)(2,1)} convert(%p.0), metadata={op_name="jit(f)/a \\"quoted) (\\" b" stack_frame_id=3}
}

ENTRY %main.9_spmd (x.1: bf16[8,128], /*index=1*/y.1: s32[]) -> (bf16[8,128], f32[]) {
  %x.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), sharding={devices=[1,4]<=[4]}, metadata={op_name="state.x"}
  %y.1 = s32[]{:T(128)} parameter(1)
  %constant.7 = f32[]{:T(128)} constant(-1.5)
  %constant.8 = s32[2]{0} constant({3, 4})
  %fusion.3 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%x.1, %y.1), kind=kLoop, calls=%inner, metadata={op_name="jit(f)/mlp/dot" stack_frame_id=4}, backend_config={"flag_configs":[],"estimated_cycles":"1234","calls":"%other"}
  %start = (bf16[8,128]{1,0}, bf16[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(bf16[8,128]{1,0} %fusion.3)
  %done = bf16[8,128]{1,0:T(8,128)} copy-done(%start)
  ROOT %tuple.1 = (bf16[8,128]{1,0:T(8,128)(2,1)}, /*index=1*/f32[]{:T(128)}) tuple(%done, %constant.7)
}
"""  # noqa: E501


def test_a_tpu_program_reads_as_it_is_written():
    computations, entry = parse(TPU)
    assert entry == "main.9_spmd"
    assert list(computations) == ["inner", "main.9_spmd"]
    main = computations[entry]
    assert list(main) == ["x.1", "y.1", "constant.7", "constant.8", "fusion.3", "start", "done", "tuple.1"]
    fusion = main["fusion.3"]
    assert (fusion.opcode, fusion.operands, fusion.calls) == ("fusion", ("x.1", "y.1"), (("calls", "inner"),))
    assert fusion.shapes == (Shape("bf16", (8, 128)),)
    assert fusion.bytes == 2048
    assert fusion.op_name == "jit(f)/mlp/dot"
    assert fusion.estimated_cycles == 1234
    assert fusion.attribute("kind") == "kLoop"
    assert main["constant.7"].literal == "-1.5" and main["constant.8"].literal == "{3, 4}"
    assert main["done"].estimated_cycles is None
    assert main["start"].operands == ("fusion.3",)
    assert main["start"].bytes == 2 * 2048 + 4
    assert root(main).shapes == (Shape("bf16", (8, 128)), Shape("f32", ()))
    assert root(computations["inner"]).op_name == 'jit(f)/a \\"quoted) (\\" b'
    assert read_program(TPU).partitions == 4


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("f32[2,3]{1,0}", 24), ("bf16[5]", 10), ("pred[7]", 7), ("s4[9]", 5), ("u8[]", 1), ("f8e4m3fn[6]", 6),
        ("c64[2]", 16), ("token[]", 0), ("f32[0,4]", 0), ("s32[<=5]", 20), ("(f32[2]{0:T(256)}, (s32[], f64[3]))", 36),
    ],
)  # fmt: skip
def test_bytes_of_a_shape(text: str, size_bytes: int):
    assert sum(shape.bytes for shape in read_shapes(text)) == size_bytes


def test_where_an_array_lies_and_what_its_tiles_take():
    near, scalar, plain, tiled, row = read_shapes(
        "(bf16[8,12,64]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:T(128)S(6)}, f32[5,3]{1,0}, f32[9,130]{0,1:T(8,128)},"
        " f32[12,3,768]{2,1,0:T(4,128)})"
    )
    assert [one.space for one in (near, scalar, plain, tiled, row)] == [1, 6, 0, 0, 0]
    assert near.padded_bytes == 8 * 16 * 128 * 2  # 12 x 64 in tiles of 8 x 128
    assert scalar.padded_bytes == 4 and plain.padded_bytes == plain.bytes == 60
    assert tiled.padded_bytes == 136 * 128 * 4  # the first axis is the fastest
    assert row.padded_bytes == 12 * 4 * 768 * 4
    assert near == Shape("bf16", (8, 12, 64))  # the same array wherever it lies


def test_every_instruction_of_a_compiled_program_is_read():
    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=3)
        return jnp.where(y > 0, y, 2.0), jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), jnp.sort(x)

    text = jax.jit(f).lower(jnp.ones((4, 4))).compile().as_text()
    program = read_program(text)
    assert sum(1 for _ in program.instructions()) == sum(" = " in line for line in text.splitlines())
    for name, computation in program.computations.items():
        for instruction in computation.values():
            assert all(operand in computation for operand in instruction.operands), (name, instruction)
            assert all(called in program.computations for _, called in instruction.calls), (name, instruction)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no ENTRY"),
        ("module @jit_f attributes {mhlo.num_partitions = 1 : i32} {\n}", "no ENTRY"),
        (TPU.replace("fusion(%x.1, %y.1)", "fusion(%x.1, %y.1"), "line 14"),
        (TPU.replace("ROOT %tuple.1 = ", "ROOT %tuple.1 is "), "line 17"),
    ],
)
def test_what_is_no_hlo_is_refused_with_its_place(text: str, said: str):
    with pytest.raises(RunError, match=said):
        parse(text)
