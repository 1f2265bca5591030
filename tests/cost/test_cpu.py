"""Time on a CPU: programs whose time is known when the speeds are, and speeds that are measured here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from podling.cost import cpu_load, cpu_peaks, cpu_probes
from podling.cost.cpu import REUSED_BYTES, cpu_step_time
from podling.cost.cpu_load import OtherWork
from podling.cost.cpu_peaks import CpuPeaks, measure_cpu
from podling.cost.cpu_work import Product, Turn, products, turns
from podling.hlo.program import read_program

PROGRAM = """
HloModule step, is_scheduled=true

%dotted (a: f32[64,32], b: f32[32,128]) -> f32[64,128] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%scaled (c: f32[64,128]) -> f32[64,128] {
  %c = f32[64,128]{1,0} parameter(0)
  ROOT %twice = f32[64,128]{1,0} add(%c, %c)
}

%risen (d: f32[64,128]) -> f32[64,128] {
  %d = f32[64,128]{1,0} parameter(0)
  %bent = f32[64,128]{1,0} tanh(%d)
  ROOT %risen.1 = f32[64,128]{1,0} exponential(%bent)
}

%turned (e: f32[64,128]) -> f32[128,64] {
  %e = f32[64,128]{1,0} parameter(0)
  %twice.1 = f32[64,128]{1,0} add(%e, %e)
  %across = f32[128,64]{0,1} transpose(%twice.1), dimensions={1,0}
  ROOT %copied = f32[128,64]{1,0} copy(%across)
}

%kept (f: f32[4,64,128], g: f32[64,128], h: s32[]) -> f32[4,64,128] {
  %f = f32[4,64,128]{2,1,0} parameter(0)
  %g = f32[64,128]{1,0} parameter(1)
  %layer = f32[1,64,128]{2,1,0} bitcast(%g)
  %h = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[4,64,128]{2,1,0} dynamic-update-slice(%f, %layer, %h, %zero, %zero)
}

%body (state: (s32[], f32[64,32], f32[32,128], f32[4,64,128])) -> (s32[], f32[64,32], f32[32,128], f32[4,64,128]) {
  %state = (s32[], f32[64,32]{1,0}, f32[32,128]{1,0}, f32[4,64,128]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64,32]{1,0} get-tuple-element(%state), index=1
  %w = f32[32,128]{1,0} get-tuple-element(%state), index=2
  %stack = f32[4,64,128]{2,1,0} get-tuple-element(%state), index=3
  %made = f32[64,128]{1,0} fusion(%x, %w), kind=kCustom, calls=%dotted, backend_config={"fusion_config":{"kind":"__ynn_fusion"}}
  %loop = f32[64,128]{1,0} fusion(%made), kind=kLoop, calls=%scaled, backend_config={"outer_dimension_partitions":["2"]}
  %alone = f32[64,128]{1,0} fusion(%loop), kind=kLoop, calls=%scaled
  %keep = f32[4,64,128]{2,1,0} fusion(%stack, %alone, %i), kind=kLoop, calls=%kept
  ROOT %next = (s32[], f32[64,32]{1,0}, f32[32,128]{1,0}, f32[4,64,128]{2,1,0}) tuple(%i, %x, %w, %keep)
}

%test (state.1: (s32[], f32[64,32], f32[32,128], f32[4,64,128])) -> pred[] {
  %state.1 = (s32[], f32[64,32]{1,0}, f32[32,128]{1,0}, f32[4,64,128]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p: f32[64,32], q: f32[32,128], r: f32[4,64,128], s: f32[64,128]) -> f32[128,64] {
  %p = f32[64,32]{1,0} parameter(0)
  %q = f32[32,128]{1,0} parameter(1)
  %r = f32[4,64,128]{2,1,0} parameter(2)
  %s = f32[64,128]{1,0} parameter(3)
  %start = s32[] constant(0)
  %carried = (s32[], f32[64,32]{1,0}, f32[32,128]{1,0}, f32[4,64,128]{2,1,0}) tuple(%start, %p, %q, %r)
  %layers = (s32[], f32[64,32]{1,0}, f32[32,128]{1,0}, f32[4,64,128]{2,1,0}) while(%carried), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %rise = f32[64,128]{1,0} fusion(%s), kind=kLoop, calls=%risen, backend_config={"outer_dimension_partitions":["2"]}
  ROOT %turn = f32[128,64]{1,0} fusion(%rise), kind=kLoop, calls=%turned, backend_config={"outer_dimension_partitions":["2"]}
}
"""  # noqa: E501
ARRAY = 64 * 128 * 4  # bytes
PRODUCT = Product((64, 32), (32, 128), ((1,), (0,)), ((), ()), "f32")
TURN = Turn((64, 128), (1, 0), "f32", plain=False, parallel=True)
PEAKS = CpuPeaks(
    product_s={PRODUCT: 5.0},
    turn_s={TURN: 7.0},
    stream_s={2**20: 2.0**20},  # a second a byte
    single_stream_s={2**20: 3 * 2.0**20},
    fresh_s_per_byte=1e-3,
    exp_s=100.0,
    tanh_s=50.0,
    call_s=0.0,
    threads=2,
)


@pytest.fixture(scope="module")
def program():
    return read_program(PROGRAM)


def time_of(program, peaks=PEAKS, **more):
    found = cpu_step_time(program, peaks, {"data": 1}, **more)
    return found, {op.name: op.step_s for op in found.ops}


def test_each_instruction_at_its_own_speed_as_often_as_it_runs(program):
    found, took_s = time_of(program)
    assert took_s["made"] == 4 * 5.0
    assert took_s["loop"] == 4 * 2 * ARRAY  # read and written by all threads
    assert took_s["alone"] == 4 * 2 * ARRAY * 3  # by one thread: the next instruction waits for it
    assert took_s["rise"] == 64 * 128 * 150.0  # its functions take longer than its bytes
    kinds = {op.name: op.kind for op in found.ops}
    assert (kinds["made"], kinds["loop"], kinds["rise"], kinds["turn"]) == ("matmul", "memory", "compute", "memory")
    assert found.step_s == pytest.approx(sum(took_s.values())) == pytest.approx(sum(found.parts_s.values()))
    assert found.range_s[0] < found.step_s < found.range_s[1]


def test_of_an_update_in_place_only_the_update_is_moved_and_nobody_waits_for_it(program):
    _, took_s = time_of(program)
    assert took_s["keep"] == 4 * (2 * ARRAY + 4) * 3 / 2  # 4 bytes say where


def test_a_transposition_takes_what_it_was_measured_to_take_where_its_bytes_take_less(program):
    assert time_of(program)[1]["turn"] == 2 * ARRAY
    slow = dataclasses.replace(PEAKS, turn_s={TURN: 1e9})
    assert time_of(program, slow)[1]["turn"] == pytest.approx(1e9)


def test_fresh_pages_cost_where_the_system_hands_them_out_anew(program):
    base = time_of(program)[0]
    assert time_of(program, temp_bytes=REUSED_BYTES - 1)[0].step_s == base.step_s
    more = time_of(program, temp_bytes=REUSED_BYTES)[0]
    assert more.step_s - base.step_s == pytest.approx(REUSED_BYTES * 1e-3)
    assert more.parts_s["memory"] - base.parts_s["memory"] == pytest.approx(REUSED_BYTES * 1e-3)


def test_what_was_not_measured_goes_by_the_speed_of_what_was(program):
    other = Product((64, 64), (64, 64), ((1,), (0,)), ((), ()), "f32")
    peaks = dataclasses.replace(PEAKS, product_s={other: 2.0})
    assert time_of(program, peaks)[1]["made"] == pytest.approx(4 * 2.0 * PRODUCT.flops / other.flops)


def test_a_cpu_as_several_devices_is_refused(program):
    with pytest.raises(ValueError, match="several devices"):
        cpu_step_time(program, PEAKS, {"data": 2})


def test_speeds_measured_beside_other_work_promise_little(program):
    """They promised 15%, and were up to 2.7 times off."""
    quiet = time_of(program)[0]
    assert quiet.calibration.endswith("seen to come within 15% on a quiet machine")
    assert quiet.range_s == pytest.approx((0.85 * quiet.step_s, 1.15 * quiet.step_s))
    assert time_of(program, dataclasses.replace(PEAKS, others=0.1, spread=0.05))[0] == quiet
    for words, more in (
        ("while other work kept 0.9 of 2 cores busy: half or twice is possible", {"others": 0.9}),
        ("while they varied by 60% from one call to the next: half or twice is possible", {"spread": 0.6}),
    ):
        busy = time_of(program, dataclasses.replace(PEAKS, **more))[0]
        assert busy.calibration.endswith(words) and "15%" not in busy.calibration
        assert busy.range_s == pytest.approx((busy.step_s / 2, busy.step_s * 2))


def test_the_work_of_others_is_what_this_process_has_not_done(tmp_path, monkeypatch):
    stat = tmp_path / "stat"

    def worked(*rows: str) -> None:
        stat.write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 0 0", *rows, "intr 5"]))

    monkeypatch.setattr(cpu_load, "cores_here", lambda: [0, 2])
    monkeypatch.setattr(cpu_load.os, "sysconf", lambda name: 100)
    now = iter([(0.0, 1.0), (2.0, 2.5)])
    monkeypatch.setattr(OtherWork, "_now", lambda self: (*clock(next(now), stat),))

    def clock(pair, path):
        return pair[0], cpu_load._worked_s(path), pair[1]

    worked("cpu0 100 0 50 1000 7 0 0 0 0 0", "cpu1 0 0 0 0 0 0 0 0 0 0", "cpu2 0 0 0 0 0 0 0 0 0 0")
    others = OtherWork(stat)
    worked("cpu0 250 0 50 1300 9 0 0 0 0 0", "cpu1 900 0 0 0 0 0 0 0 0 0", "cpu2 0 0 0 10 0 10 0 90 0 0")
    assert others.cores() == pytest.approx((1.5 + 1.0 - 1.5) / 2)  # 90 hundredths of it stolen by the host


def test_a_system_that_does_not_say_what_others_do(tmp_path):
    assert OtherWork(tmp_path / "absent").cores() is None
    (tmp_path / "stat").write_text("cpu0 a b")
    assert OtherWork(tmp_path / "stat").cores() is None


def test_measuring_has_an_end_however_busy_the_machine_is(monkeypatch):
    """It took 15 s under load: late, nothing is repeated, and what can go by the speed of others is left out."""
    shapes = [jax.ShapeDtypeStruct((size, size), jnp.float32) for size in (256, 256)]

    def step(x, y):
        return x @ y, jnp.tanh(x[:128] @ y)

    found = read_program(jax.jit(step).lower(*shapes).compile().as_text())
    assert len(products(found)) == 2
    for name in ("COMPILING_S", "REPEATING_S", "CALLING_S"):
        monkeypatch.setattr(cpu_peaks, name, 0.0)
    calls = []
    timed = cpu_probes.Probe.calls_s

    def counted(self, *positional, **named):
        took_s = timed(self, *positional, **named)
        calls.append(len(took_s))
        return took_s

    monkeypatch.setattr(cpu_probes.Probe, "calls_s", counted)
    peaks = measure_cpu(found)
    assert set(calls) == {1}  # after one that warms up
    assert [product.flops for product in peaks.product_s] == [2 * 256**3]  # the larger one
    assert cpu_step_time(found, peaks).step_s > 0


def test_work_is_counted_over_a_whole_step(program):
    assert products(program) == {PRODUCT: 4 * 2 * 64 * 32 * 128}
    assert turns(program) == {TURN: 64 * 128}


def test_two_transpositions_in_a_row_bring_rows_back():
    inner = PROGRAM.replace(
        "ROOT %copied = f32[128,64]{1,0} copy(%across)",
        "%copied = f32[128,64]{1,0} copy(%across)\n"
        "  %again = f32[64,128]{0,1} transpose(%copied), dimensions={1,0}\n"
        "  ROOT %back = f32[64,128]{1,0} copy(%again)",
    )
    assert not turns(read_program(inner))
    batched = PROGRAM.replace("transpose(%twice.1), dimensions={1,0}", "transpose(%twice.1), dimensions={0,1}")
    assert not turns(read_program(batched))


def test_a_large_product_is_measured_in_part():
    whole = Product((8, 4096, 64), (8, 64, 4096), ((2,), (1,)), ((0,), (0,)), "f32")
    part = whole.part(1e9)
    assert whole.flops == 2 * 8 * 4096 * 4096 * 64
    assert part.flops <= 1e9 < 2 * part.flops
    assert part.left[0] == part.right[0] == 8 and part.left[2] == part.right[1] == 64
    long = Product((64, 2**22), (2**22, 64), ((1,), (0,)), ((), ()), "f32").part(1e9)
    assert (long.left, long.right) == ((64, 2**16), (2**16, 64))  # the axis that is summed is cut in both


def test_a_large_transposition_is_measured_in_part():
    whole = Turn((64, 4096, 768), (1, 2, 0), "f32", plain=True, parallel=True)
    part = whole.part(2**20)
    assert part.size <= 2**20 < 2 * part.size
    assert (part.dims[0], part.dims[2]) == (64, 768)  # neighbours are as far apart as before
    assert Turn((2**12, 2**12), (1, 0), "f32", plain=True, parallel=True).part(2**20).size == 2**20


def test_speeds_measured_here_know_large_from_small():
    """On whatever machine this is, and however busy."""

    def step(x, y):
        for _ in range(2):
            y = jnp.tanh(x @ y)
        return y, x.T @ y

    shapes = [jax.ShapeDtypeStruct((size, 512), jnp.float32) for size in (512, 512)]
    program = read_program(jax.jit(step).lower(*shapes).compile().as_text())
    peaks = measure_cpu(program)
    assert peaks.product_s and min(peaks.product_s.values()) > 2 * 512**3 / 1e14  # no CPU is that fast
    for known in (peaks.stream_s, peaks.single_stream_s):
        assert known[max(known)] > known[min(known)] > 0
    assert peaks.fresh_s_per_byte >= 0 and peaks.exp_s > 0 and peaks.tanh_s > 0
    assert cpu_step_time(program, peaks).step_s > 3 * min(peaks.product_s.values())
