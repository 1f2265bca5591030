"""The first signal is noted, the second Ctrl-C interrupts, and afterwards everything is as before."""

import os
import signal
import threading

import pytest

from podling.train.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_only_noted(number):
    with StopRequest() as stop:
        assert stop.signal_number is None
        os.kill(os.getpid(), number)
        assert stop.signal_number == number


def test_a_signal_that_is_ignored_stays_ignored():
    """nohup ignores SIGHUP, so that a run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_number is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_does_not_wait():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler that repeats itself is still given time to save
        assert stop.signal_number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_after_an_error():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ValueError, match="inside"), StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise ValueError("inside")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_the_main_thread_signals_are_left_alone():
    """Python allows handlers in the main thread only; a run elsewhere (a notebook's worker) still works."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((stop.signal_number, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
