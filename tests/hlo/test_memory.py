"""Which arrays a program makes."""

import jax
import jax.numpy as jnp

from podling.hlo.memory import held, largest
from podling.hlo.program import read_program


def program_of(f, *args):
    return read_program(jax.jit(f).lower(*args).compile().as_text())


def test_the_largest_arrays_are_those_the_program_makes():
    def f(x, y):
        return jnp.sum(jnp.tanh(x @ y) @ jnp.sin(x))  # [30, 40], made twice over, and a scalar

    program = program_of(f, jnp.ones((30, 40)), jnp.ones((40, 30)))
    assert largest(program, 1)[0][0].size == 1200
    assert {array.shape.size for array in held(program)} >= {1200, 900, 1}
    assert max(array.shape.size for array in held(program)) == 1200


FUSED = """\
HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%fused (p: f32[77]) -> f32[77] {
  %p = f32[77] parameter(0)
  %wide = f32[77,77] broadcast(%p), dimensions={0}
  %zero = f32[] constant(0)
  ROOT %r = f32[77] reduce(%wide, %zero), dimensions={1}, to_apply=%add
}

ENTRY %main (x: f32[77]) -> f32[77] {
  %x = f32[77] parameter(0)
  ROOT %f = f32[77] fusion(%x), kind=kLoop, calls=%fused
}
"""


def test_what_stays_inside_a_fusion_is_not_held():
    program = read_program(FUSED)
    assert [(a.shape.size, a.instruction.name) for a in held(program)] == [(77, "x"), (77, "f")]
    assert largest(program, 1)[0][0].size == 77


def test_arrays_made_in_a_loop_are_held_and_plumbing_is_counted_once():
    def f(x):
        return jax.lax.scan(lambda c, _: (c @ x, jnp.sum(c)), x, None, length=5)[0]

    program = program_of(f, jnp.ones((13, 13)))
    makers = [a.instruction.opcode for a in held(program) if a.shape.dims == (13, 13)]
    assert "parameter" in makers
    assert not {"tuple", "get-tuple-element", "while"} & set(makers)
    assert any(a.computation != program.entry for a in held(program) if a.shape.dims == (13, 13))
