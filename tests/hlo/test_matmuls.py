"""Matrix products read from programs: XLA's own count on CPU, and the windows that the TPU compiler writes."""

import jax
import jax.numpy as jnp
import pytest

from podling.hlo.matmuls import find_matmuls
from podling.hlo.program import read_program


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


@pytest.mark.parametrize(
    ("equation", "left", "right", "sizes"),
    [
        ("mk,kn->mn", (48, 32), (32, 80), (1, 48, 32, 80)),
        ("btd,df->btf", (2, 24, 32), (32, 80), (1, 48, 32, 80)),
        ("btd,btf->df", (2, 24, 32), (2, 24, 80), (1, 32, 48, 80)),
        ("bhtk,bhsk->bhts", (2, 3, 48, 16), (2, 3, 64, 16), (6, 48, 16, 64)),
    ],
)  # fmt: skip
def test_sizes_of_a_compiled_product(equation: str, left, right, sizes):
    text = compiled(lambda a, b: jnp.einsum(equation, a, b), jnp.ones(left), jnp.ones(right)).as_text()
    (found,) = find_matmuls(read_program(text))
    batch, m, k, n = sizes
    # The compiler may turn a product round: m and n change places.
    assert (found.batch, found.k, {found.m, found.n}) == (batch, k, {m, n})
    assert found.flops == 2 * batch * m * k * n and found.dtype == "f32" and found.passes == 1


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_operations_of_a_true_convolution_are_those_that_xla_counts(strides, padding: str):
    def f(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers)

    program = compiled(f, jnp.ones((2, 9, 10, 4)), jnp.ones((3, 5, 4, 6)))
    products = find_matmuls(read_program(program.as_text()))
    assert sum(one.flops for one in products) == program.cost_analysis()["flops"] > 0


# A product as the TPU compiler writes it: the sizes of its operands and its result, window and labels.
@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "sizes"),
    [
        # btd,df->btf: the rows of all sequences
        ("8,1024,768", "768,3072,1", "8,1024,3072", "window={size=1}, dim_labels=0bf_io0->0bf",
         (1, 8192, 768, 3072)),
        # btf,btd->fd: sums over both axes of the batch
        ("8,1024,3072", "8,1024,768", "3072,768,1", "window={size=8}, dim_labels=0fb_0io->bf0",
         (1, 3072, 8192, 768)),
        # bthk,bshk->bhts: one product for each sequence and head
        ("8,1024,12,64", "8,1024,12,64", "8,12,1024,1024",
         "window={size=8x12 stride=7x11 lhs_dilate=8x12}, dim_labels=0b1f_0o1i->01bf", (96, 1024, 64, 1024)),
        # btd,cdn->cbtn with the sequences among the columns of the second factor
        ("3,768,768,1", "8,1024,768,1", "3,768,8,1024",
         "window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0fb1_1oi0->0b1f", (1, 2304, 768, 8192)),
    ],
)  # fmt: skip
def test_windows_of_the_tpu_compiler(left: str, right: str, result: str, attributes: str, sizes):
    text = f"""\
HloModule m

%fused (p: bf16[1], q: bf16[1]) -> f32[1] {{
  %p = bf16[{left}] parameter(0)
  %q = bf16[{right}] parameter(1)
  ROOT %product = f32[{result}] convolution(%p, %q), {attributes}, metadata={{op_name="here"}}
}}

ENTRY %main (x: bf16[1], y: bf16[1]) -> f32[1] {{
  %x = bf16[{left}] parameter(0)
  %y = bf16[{right}] parameter(1)
  ROOT %r = f32[{result}] fusion(%x, %y), kind=kOutput, calls=%fused
}}
"""
    (found,) = find_matmuls(read_program(text))
    assert (found.batch, found.m, found.k, found.n) == sizes
    batch, m, k, n = sizes
    assert found.flops == 2 * batch * m * k * n
    assert (found.scheduled_in, found.instruction, found.dtype, found.op_name) == ("main", "r", "bf16", "here")


def test_full_precision_takes_six_passes():
    text = """\
HloModule m

ENTRY %main (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16] parameter(0)
  %y = f32[16,4] parameter(1)
  ROOT %r = f32[8,4] convolution(%x, %y), dim_labels=bf_io->bf, operand_precision={highest,highest}
}
"""
    (found,) = find_matmuls(read_program(text))
    assert (found.passes, found.flops) == (6, 2 * 8 * 16 * 4)
    (found,) = find_matmuls(read_program(text.replace("f32[16,4]", "bf16[16,4]")))
    assert (found.passes, found.dtype) == (1, "bf16")
