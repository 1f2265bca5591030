"""Step time of programs written by hand, whose answer is known.

The chip of these tests: 1000 cycles, 1e6 operations, 1000 bytes of memory and 1000 bytes over a link each take 1 us.
"""

import dataclasses
import math

import pytest

from podling.chips import CHIPS
from podling.cost.calibration import calibration
from podling.cost.links import HOP_S
from podling.cost.step_time import step_time
from podling.errors import InputError
from podling.hlo.program import read_program
from podling.topology import parse_topology

CHIP = dataclasses.replace(
    CHIPS["v5e"], clock_hz=1e9, peak_flops={"bfloat16": 1e12}, hbm_bytes_per_s=1e9, link_bytes_per_s=1e9
)
US = 1e-6
ONE, PAIR = {"data": 1, "fsdp": 1, "tensor": 1}, {"data": 1, "fsdp": 4, "tensor": 2}
SMALL = "f32[250]{0:T(1024)}"  # 1000 bytes
NEAR = "f32[250]{0:T(1024)S(1)}"  # the same in VMEM


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


def program(body: str, before: str = ""):
    return read_program(f"""\
HloModule m, is_scheduled=true, num_partitions=8
{before}
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[250]) -> f32[250] {{
  %x = {SMALL} parameter(0)
  %n = {NEAR} parameter(1)
  %m = bf16[100,100]{{1,0:T(8,128)(2,1)S(1)}} parameter(2)
  %q = f32[100,100]{{1,0:T(8,128)S(1)}} parameter(3)
{body}
}}
""")


def timed(body: str, before: str = "", mesh=ONE, factor: float = 1.0, **options):
    return step_time(program(body, before), CHIP, mesh, factor=factor, **options)


@pytest.mark.parametrize(
    ("line", "factor", "us", "kind"),
    [
        (f"%r = {NEAR} tanh(%n), {cycles(5000)}", 1.0, 5, "compute"),  # the compiler's estimate
        (f"%r = {NEAR} tanh(%n), {cycles(5000)}", 0.5, 2.5, "compute"),
        (f"%r = {SMALL} tanh(%x), {cycles(5000)}", 1.0, 5, "compute"),
        (f"%r = {SMALL} tanh(%x), {cycles(3000)}", 1.0, 3, "memory"),  # 2000 bytes: more than half of it
        (f"%r = {SMALL} tanh(%x), {cycles(3000)}", 0.1, 2, "memory"),  # the floor does not shrink with the factor
        (f"%r = {SMALL} tanh(%x)", 1.0, 2, "memory"),  # no estimate: the floor alone
        (f"%r = {NEAR} tanh(%n)", 1.0, 0, None),
        ("%r = f32[100,100]{1,0:S(1)} convolution(%m, %m), dim_labels=bf_io->bf", 1.0, 2, "matmul"),
        (f"%r = f32[100,100]{{1,0:S(1)}} convolution(%m, %m), dim_labels=bf_io->bf, {cycles(3000)}", 1.0, 3, "matmul"),
        (f"%r = f32[100,100]{{1,0:S(1)}} convolution(%m, %m), dim_labels=bf_io->bf, {cycles(5000)}", 1.0, 5, "compute"),
        ("%r = f32[100,100]{1,0:S(1)} convolution(%q, %q), dim_labels=bf_io->bf, operand_precision={highest,highest}",
         1.0, 12, "matmul"),  # six passes
        ("%r = f32[100,100]{1,0} convolution(%m, %m), dim_labels=bf_io->bf", 1.0, 40, "memory"),  # writes 40,000 bytes
    ],
)  # fmt: skip
def test_an_instruction_takes_its_longest_bound(line: str, factor: float, us: float, kind: str | None):
    step = timed("  ROOT " + line, factor=factor)
    assert step.step_s == pytest.approx(us * US)
    assert {part for part, seconds in step.parts_s.items() if seconds} == ({kind} if kind else set())
    assert sum(step.parts_s.values()) == pytest.approx(step.step_s)


LOOP = f"""
%cond (p: (s32[], f32[250])) -> pred[] {{
  %p = (s32[], f32[250]) parameter(0)
  %bound = s32[]{{:S(6)}} constant(12)
  %i = s32[]{{:S(6)}} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{{:S(6)}} compare(%i, %bound), direction=LT, {cycles(100)}
}}

%body (p: (s32[], f32[250])) -> (s32[], f32[250]) {{
  %p = (s32[], f32[250]) parameter(0)
  %i = s32[]{{:S(6)}} get-tuple-element(%p), index=0
  %one = s32[]{{:S(6)}} constant(1)
  %next = s32[]{{:S(6)}} add(%i, %one)
  %v = {NEAR} get-tuple-element(%p), index=1
  %w = {NEAR} tanh(%v), {cycles(5000)}
  ROOT %t = (s32[], f32[250]) tuple(%next, %w)
}}
"""
RUN_LOOP = """\
  %zero = s32[] constant(0)
  %t = (s32[], f32[250]) tuple(%zero, %n)
  %w = (s32[], f32[250]) while(%t), condition=%cond, body=%body
"""


def test_a_loop_takes_all_its_turns():
    step = timed(RUN_LOOP + f"  ROOT %r = {NEAR} tanh(%n), {cycles(1000)}", LOOP)
    assert step.step_s == pytest.approx((12 * 5 + 13 * 0.1 + 1) * US)
    assert [(op.name, op.times) for op in step.ops] == [("w", 12), ("lt", 13), ("r", 1)]
    assert step.ops[0].step_s == pytest.approx(60 * US)


def test_a_loop_of_unknown_length_is_said():
    step = timed(RUN_LOOP, LOOP.replace("direction=LT", "direction=NE"))
    assert step.step_s == pytest.approx((5 + 2 * 0.1) * US)
    assert "loops of unknown length counted once: w" in step.calibration


def test_a_conditional_takes_its_longer_branch():
    def branch(name: str, count: int) -> str:
        last = f"  ROOT %{name}.r = {NEAR} tanh(%p), {cycles(count)}"
        return f"%{name} (p: f32[250]) -> f32[250] {{\n  %p = {NEAR} parameter(0)\n{last}\n}}\n"

    line = f"""\
  %k = s32[]{{:S(6)}} constant(0)
  ROOT %c = {NEAR} conditional(%k, %n, %n), branch_computations={{%one, %two}}"""
    step = timed(line, branch("one", 2000) + branch("two", 7000))
    assert step.step_s == pytest.approx(7 * US)
    assert [op.name for op in step.ops] == ["two.r"]


@pytest.mark.parametrize(("between", "waited"), [(0, 1.0), (400, 0.6), (5000, 0.0)])
def test_a_copy_between_memories_overlaps(between: int, waited: float):
    step = timed(f"""\
  %b = {NEAR} tanh(%n), {cycles(9000)}
  %s = ({NEAR}, {SMALL}, u32[]{{:S(2)}}) copy-start(%x)
  %a = {NEAR} tanh(%n), {cycles(between)}
  ROOT %d = {NEAR} copy-done(%s)""")
    assert step.parts_s["memory"] == pytest.approx(waited * US)
    assert step.step_s == pytest.approx((9 + between / 1000 + waited) * US)  # what came before it does not count


def test_an_instruction_that_reads_memory_leaves_a_copy_what_is_left_of_it():
    step = timed(f"""\
  %s = ({NEAR}, {SMALL}, u32[]{{:S(2)}}) copy-start(%x)
  %a = {SMALL} tanh(%x), {cycles(2400)}
  ROOT %d = {NEAR} copy-done(%s)""")
    assert step.step_s == pytest.approx((2.4 + 0.6) * US)  # 2.0 of the 2.4 were its own


GATHER = "channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true"
WHOLE = "f32[500]{0:T(1024)S(1)}"
LINK_S = 1 * US + HOP_S  # each of two neighbours sends its 1000 bytes


def test_a_collective_is_waited_for():
    step = timed(f"  ROOT %g = {WHOLE} all-gather(%n), {GATHER}", mesh=PAIR)
    assert step.parts_s["collective"] == pytest.approx(LINK_S) == step.step_s
    assert step.ops[0].links_s == pytest.approx(LINK_S) == step.ops[0].floor_s


@pytest.mark.parametrize(("between", "waited"), [(0, 2.0), (500, 1.5), (9000, 0.0)])
def test_compute_between_start_and_done_hides_a_collective(between: int, waited: float):
    step = timed(
        f"""\
  %s = ({NEAR}, {WHOLE}) all-gather-start(%n), {GATHER}
  %a = {NEAR} tanh(%n), {cycles(between)}
  ROOT %d = {WHOLE} all-gather-done(%s)""",
        mesh=PAIR,
    )
    assert step.parts_s["collective"] == pytest.approx(waited * US)
    assert step.step_s == pytest.approx((between / 1000 + waited) * US)
    (op,) = [op for op in step.ops if op.kind == "collective"]
    assert (op.name, op.floor_s) == ("s", 0.0) and op.links_s == pytest.approx(2 * US)


@pytest.mark.parametrize(
    ("second", "groups", "waited"),
    [("tensor", "[4,2]<=[8]", 4.0), ("fsdp", "[2,4]<=[4,2]T(1,0)", None)],
)  # fmt: skip
def test_collectives_over_the_same_links_go_one_after_the_other(second: str, groups: str, waited: float | None):
    other = GATHER.replace("[4,2]<=[8]", groups).replace("channel_id=1", "channel_id=2")
    size = "f32[500]" if second == "tensor" else "f32[1000]"

    def alone(lines: str):
        return timed(lines, mesh=PAIR).parts_s["collective"]

    starts = f"  %s = ({NEAR}, {WHOLE}) all-gather-start(%n), {GATHER}\n"
    more = f"  %s2 = ({NEAR}, {size}{{0:S(1)}}) all-gather-start(%n), {other}\n"
    ends = f"  %d = {WHOLE} all-gather-done(%s)\n"
    last = f"  ROOT %d2 = {size}{{0:S(1)}} all-gather-done(%s2)\n"
    both = alone(starts + more + ends + last)
    if waited:
        assert both == pytest.approx(waited * US)
    else:  # over other links: at the same time
        assert both == pytest.approx(max(alone(starts + ends), alone(more + last)))


CHAIN = f"""
%begin (p: f32[250]) -> (f32[250], f32[500]) {{
  %p = {NEAR} parameter(0)
  %g.1 = {WHOLE} all-gather(%p), {GATHER}, backend_config={{"async_collective_fusion_config":{{"flag_start":"-1"}}}}
  ROOT %t = ({NEAR}, {WHOLE}) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}}

%middle (p: f32[250], q: bf16[100,100]) -> (f32[100,100], f32[500]) {{
  %p = {NEAR} parameter(0)
  %q = bf16[100,100] parameter(1)
  %c = f32[100,100]{{1,0:S(1)}} convolution(%q, %q), dim_labels=bf_io->bf
  %g.2 = {WHOLE} all-gather(%p), {GATHER}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %t = (f32[100,100]{{1,0:S(1)}}, {WHOLE}) tuple(%c, %g.2)
}}

%end (p: f32[250]) -> f32[500] {{
  %p = {NEAR} parameter(0)
  %g.3 = {WHOLE} all-gather(%p), {GATHER}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %c = {WHOLE} custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}}
"""


@pytest.mark.parametrize(("size_bytes", "waited"), [(250, 0.0), (1250, 4.0)])
def test_a_chain_of_fusions_hides_its_collective(size_bytes: int, waited: float):
    chain = CHAIN.replace("f32[500]", f"f32[{2 * size_bytes}]").replace("f32[250]", f"f32[{size_bytes}]")
    body = f"""\
  %f.1 = ({NEAR}, {WHOLE}) fusion(%n), kind=kCustom, calls=%begin
  %f.2 = (f32[100,100]{{1,0:S(1)}}, {WHOLE}) fusion(%n, %m), kind=kOutput, calls=%middle
  ROOT %f.3 = {WHOLE} fusion(%n), kind=kCustom, calls=%end"""
    step = timed(body, chain, mesh=PAIR)
    assert step.parts_s["matmul"] == pytest.approx(2 * US)
    assert step.parts_s["collective"] == pytest.approx(waited * US)


def test_a_collective_in_a_fusion_comes_after_what_is_fused_with_it():
    inside = f"""
%scatter (p: f32[250], q: bf16[100,100]) -> f32[125] {{
  %p = {NEAR} parameter(0)
  %q = bf16[100,100] parameter(1)
  %z = s32[] constant(0)
  %c = f32[100,100]{{1,0:S(1)}} convolution(%q, %q), dim_labels=bf_io->bf
  %r = {NEAR} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%sum
  ROOT %d = f32[125]{{0:S(1)}} dynamic-slice(%r, %z), dynamic_slice_sizes={{125}}
}}
"""
    step = timed("  ROOT %f = f32[125]{0:S(1)} fusion(%n, %m), kind=kCustom, calls=%scatter", inside, mesh=PAIR)
    assert step.parts_s["collective"] == pytest.approx(0.5 * US + HOP_S)  # half of its 1000 bytes go over
    assert step.step_s == pytest.approx(2.5 * US + HOP_S)


def test_a_custom_kernel_takes_twice_its_operations_at_peak():
    call = f'  ROOT %k = {NEAR} custom-call(%n), custom_call_target="tpu_custom_call", backend_config='
    stated = timed(call + '{"custom_call_config":{"cost_estimate":{"flops":"3000000","bytes_accessed":"9"}}}')
    assert stated.parts_s["matmul"] == pytest.approx(6 * US)
    assert "custom kernels" not in stated.calibration
    silent = timed(call.replace("(%n)", "(%x)") + '{"custom_call_config":{"body":"abc"}}')
    assert silent.step_s == pytest.approx(1 * US)
    assert "1 custom kernels state no operations" in silent.calibration


@pytest.mark.parametrize(
    ("flops", "length", "expected"),
    [(10**6, 1024, 2 * 3 * 4677 / 1.5e9), (10**12, 1024, 2e12 / 197e12), (10**6, 1152, 2e6 / 197e12)],
)
def test_a_kernel_takes_the_cycles_that_were_scheduled_for_it(flops: int, length: int, expected: float):
    """Never less than twice its operations at peak; that alone for sizes whose schedule is not known."""
    chip = dataclasses.replace(CHIPS["v5e"], hbm_bytes_per_s=math.inf)
    kernel = (
        f"  ROOT %fused_attention_forward.1 = (bf16[2,{length},384]{{2,1,0}}, f32[2,3,2,{length}]{{3,2,1,0}}) "
        'custom-call(%n), custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{flops}"}}}}}}'
    )
    step = step_time(program(kernel), chip, ONE, factor=0.5)
    assert step.step_s == pytest.approx(expected, rel=1e-6)


def test_the_calibrated_factor_and_its_range():
    known = calibration("v5e")
    text = program(f"  ROOT %r = {NEAR} tanh(%n), {cycles(5000)}")
    step = step_time(text, CHIP, ONE)
    assert step.step_s == pytest.approx(5 * US * known.factor)
    assert step.range_s == (pytest.approx(step.step_s * known.low), pytest.approx(step.step_s * known.high))
    assert known.low < 1 < known.high and step.calibration == known.words
    given = step_time(text, CHIP, ONE, factor=1.0)
    assert given.range_s == (given.step_s, given.step_s)


def test_cycles_alone_add_up():
    """On a chip that is limited by nothing else, a step is the sum of the estimates, times the turns."""
    free = dataclasses.replace(CHIP, peak_flops={"bfloat16": math.inf}, hbm_bytes_per_s=math.inf)
    text = program(RUN_LOOP + f"  ROOT %r = {SMALL} tanh(%x), {cycles(777)}", LOOP)
    expected = sum(
        (instruction.estimated_cycles or 0) * text.times[name]
        for name, instruction in text.instructions()
        if text.scheduled_in(name) == name
    )
    assert step_time(text, free, ONE, factor=1.0).step_s == pytest.approx(expected / 1e9)
    assert expected == 12 * 5000 + 13 * 100 + 777


def test_what_does_not_go_together_is_refused():
    body = f"  ROOT %r = {NEAR} tanh(%n)"
    with pytest.raises(InputError, match="v5e:2x4 has 8"):
        step_time(program(body), CHIP, ONE, parse_topology("v5e:2x4"))
    with pytest.raises(ValueError, match="h100 is no TPU"):
        step_time(program(body), CHIPS["h100"], ONE)


def exchanged(between: str, kind: str = "ALL_REDUCE") -> str:
    """1000 bytes to the other slices and back, beside what stands between."""
    says = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="add.1_0",'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    return f"""
  %after = token[] after-all()
  %to = ({SMALL}, u32[], token[]) send(%x, %after), channel_id=2, {says}
  %from = ({SMALL}, u32[], token[]) recv(%after), channel_id=1, {says}
{between}
  %sent = token[] send-done(%to), channel_id=2, is_host_transfer=true
  %got = ({SMALL}, token[]) recv-done(%from), channel_id=1, is_host_transfer=true"""


@pytest.mark.parametrize(
    ("kind", "between", "waited_us"),
    [
        ("ALL_REDUCE", "", 10),  # there and back: half of it each time, at 100 bytes/us
        ("REDUCE_SCATTER", "", 5),
        ("ALL_REDUCE", f"  %r = {NEAR} tanh(%n), {cycles(4000)}", 6),  # beside compute
        ("ALL_REDUCE", f"  %r = {NEAR} tanh(%n), {cycles(40000)}", 0),
    ],
)
def test_what_slices_exchange_is_waited_for(kind, between, waited_us):
    chip = dataclasses.replace(CHIP, between_slices_bytes_per_s=1e8)
    two = {"data": 2, "fsdp": 4, "tensor": 2}
    found = step_time(program(exchanged(between, kind)), chip, two, slices=2, factor=1.0)
    assert found.parts_s["collective"] == pytest.approx(waited_us * US)
    assert [op.op_name for op in found.ops if op.kind == "collective"] == [
        f"between slices: {kind.lower().replace('_', '-')}"
    ]
    assert "never measured" in found.calibration


def test_collectives_of_a_slices_program_stay_within_it():
    body = f"  %r = {SMALL} all-reduce(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%sum"
    alone = timed(body, mesh={"data": 8, "fsdp": 1, "tensor": 1})
    both = timed(body, mesh={"data": 16, "fsdp": 1, "tensor": 1}, slices=2)  # 8 partitions: of one slice
    assert alone.parts_s["collective"] == both.parts_s["collective"] > 0
