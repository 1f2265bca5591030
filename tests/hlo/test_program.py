"""How often each instruction runs: loops written down, read from their conditions, nested, unknown."""

import re

import jax
import jax.numpy as jnp
import pytest

from podling.hlo.program import Program, read_program


def compiled(f, *args) -> str:
    return jax.jit(f).lower(*args).compile().as_text()


def as_on_tpu(text: str) -> str:
    """Without the trip counts that the CPU compiler writes down."""
    assert "known_trip_count" in text
    return re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"none":{}', text)


def dot_times(program: Program) -> int:
    """Runs of all instructions that stem from the line named `here`, one of them a step."""
    runs = [
        program.times[program.scheduled_in(name)]
        for name, instruction in program.instructions()
        if instruction.opcode in ("dot", "custom-call") and "here" in instruction.op_name
    ]
    return sum(runs)


def nested(x, outer: int, inner: int):
    def step(carry, _):
        with jax.named_scope("here"):
            return jnp.tanh(carry @ x), None

    def steps(carry, _):
        return jax.lax.scan(step, carry, None, length=inner)[0] * 2, None

    return jax.lax.scan(steps, x, None, length=outer)[0]


@pytest.mark.parametrize(("outer", "inner"), [(3, 5), (2, 7), (4, 4)])
@pytest.mark.parametrize("spelling", [str, as_on_tpu])
def test_nested_loops_multiply(outer: int, inner: int, spelling):
    text = compiled(lambda x: nested(x, outer, inner) + nested(x, 6, 2), jnp.ones((64, 64)))
    program = read_program(spelling(text))
    assert dot_times(program) == outer * inner + 12
    assert program.unknown_loops == []


@pytest.mark.parametrize("spelling", [str, as_on_tpu])
def test_a_gradient_runs_its_loop_twice(spelling):
    def loss(x):
        return jnp.sum(nested(x, 3, 4))

    program = read_program(spelling(compiled(jax.grad(loss), jnp.ones((64, 64)))))
    assert dot_times(program) == 12 + 2 * 12  # forward, and for each product two in the backward pass


def loop(first: int, bound: str, step: int, direction: str = "LT") -> str:
    """A loop as the TPU compiler leaves it, in a few lines."""
    return f"""\
HloModule m

%cond (p: (s32[], f32[4], s32[])) -> pred[] {{
  %p = (s32[], f32[4], s32[]) parameter(0)
  %bound = s32[] {bound}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction={direction}
}}

%body (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %p = (s32[], f32[4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %x = f32[4] get-tuple-element(%p), index=1
  %y = f32[4] tanh(%x)
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %t = (s32[], f32[4], s32[]) tuple(%next, %y, %n)
}}

ENTRY %main (x: f32[4], n: s32[]) -> f32[4] {{
  %x = f32[4] parameter(0)
  %n = s32[] parameter(1)
  %first = s32[] constant({first})
  %started = s32[] copy(%first)
  %nine = s32[] constant(9)
  %t = (s32[], f32[4], s32[]) tuple(%started, %x, %nine)
  %w = (s32[], f32[4], s32[]) while(%t), condition=%cond, body=%body
  ROOT %r = f32[4] get-tuple-element(%w), index=1
}}
"""


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        (loop(0, "constant(12)", 1), 12),
        (loop(3, "constant(12)", 1), 9),
        (loop(0, "constant(12)", 5), 3),  # 0, 5, 10
        (loop(12, "constant(12)", 1), 0),
        (loop(0, "get-tuple-element(%p), index=2", 1), 9),  # the bound is carried along
        (loop(0, "constant(12)", 1, "GT").replace("(%i, %bound)", "(%bound, %i)"), 12),
    ],
)  # fmt: skip
def test_a_bound_is_read_from_the_condition(text: str, turns: int):
    program = read_program(text)
    assert program.times == {"main": 1, "body": turns, "cond": turns + 1}
    assert program.unknown_loops == []


@pytest.mark.parametrize(
    "text",
    [
        loop(0, "constant(12)", 1).replace("%nine)", "%n)").replace("constant(12)", "get-tuple-element(%p), index=2"),
        loop(0, "constant(12)", 1).replace("tuple(%started", "tuple(%n"),
        loop(0, "constant(12)", 1, direction="NE"),
        loop(0, "constant(12)", 1).replace("add(", "multiply("),
    ],
    ids=["bound", "start", "direction", "step"],
)
def test_a_loop_of_unknown_length_is_named(text: str):
    program = read_program(text)
    assert program.times["body"] == 1
    assert program.unknown_loops == ["w"]


def test_a_while_loop_of_the_data_is_unknown():
    text = compiled(lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c * 2, x), jnp.ones(3))
    program = read_program(text)
    assert len(program.times) > 1 and len(program.unknown_loops) == 1
