"""Time per step, speed, MFU and the share of waiting, with a clock that the test turns."""

import pytest

from podling.train.meter import Meter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, peak: float | None = 1e6) -> Meter:
    return Meter(tokens=500, flops_per_token=40, peak_flops_per_s=peak, clock=clock)


def test_nothing_is_known_before_a_timed_step(clock):
    meter = make(clock)
    meter.pause()
    clock.now += 30  # compiling
    meter.step(wait_s=5)
    assert meter.step_s is None and meter.steps == 0 and meter.data_wait_share is None
    assert meter.totals() == {"step_s": None, "tokens_per_s": None, "mfu": None, "data_wait_share": None}


def test_figures_of_two_steps(clock):
    meter = make(clock)
    meter.resume()
    for took_s, wait_s in ((1.0, 0.1), (3.0, 0.5)):
        clock.now += took_s
        meter.step(wait_s)
    assert meter.step_s == pytest.approx(2.0)
    assert meter.totals() == pytest.approx(
        {"step_s": 2.0, "tokens_per_s": 250.0, "mfu": 250 * 40 / 1e6, "data_wait_share": 0.6 / 4}
    )


def test_what_is_not_a_step_is_not_counted(clock):
    meter = make(clock)
    meter.resume()
    clock.now += 2
    meter.step(0)
    clock.now += 60  # an evaluation
    meter.resume()
    clock.now += 4
    meter.step(0)
    assert meter.train_s == 6 and meter.step_s == 3


def test_the_step_after_a_pause_is_not_timed_and_the_next_one_is(clock):
    meter = make(clock)
    meter.resume()
    meter.pause()
    clock.now += 50
    meter.step(40)
    clock.now += 2
    meter.step(1)
    assert (meter.steps, meter.train_s, meter.wait_s) == (1, 2, 1)


def test_the_displayed_speed_is_of_the_last_twenty_steps_and_the_total_of_all(clock):
    meter = make(clock)
    meter.resume()
    for took_s in [10.0] * 5 + [1.0] * 20:
        clock.now += took_s
        meter.step(0)
    assert meter.step_s == pytest.approx(1.0)
    assert meter.totals()["step_s"] == pytest.approx(70 / 25)


def test_an_unknown_peak_gives_no_mfu(clock):
    meter = make(clock, peak=None)
    assert meter.speed(2.0) == {"step_s": 2.0, "tokens_per_s": 250.0, "mfu": None}


def test_totals_go_on_over_sessions(clock):
    first = make(clock)
    first.resume()
    clock.now += 4
    first.step(1)
    second = make(clock)
    second.restore(first.state())
    second.resume()
    clock.now += 2
    second.step(2)
    assert second.totals()["step_s"] == 3 and second.data_wait_share == 0.5
    assert second.step_s == 2  # the display does not look back over the break


def test_a_session_knows_its_own_steps_from_those_before(clock):
    meter = make(clock)
    meter.restore({"steps": 10, "train_s": 50.0, "wait_s": 0.0})
    assert meter.session_step_s is None
    meter.resume()
    for took_s in (1.0, 2.0):
        clock.now += took_s
        meter.step(wait_s=0)
    assert meter.session_step_s == pytest.approx(1.5)
    assert meter.totals()["step_s"] == pytest.approx(53 / 12)
