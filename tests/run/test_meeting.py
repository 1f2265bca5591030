"""Checkpoints of several processes: a failure in one opens every barrier, and each checks its share."""

import threading

import jax.numpy as jnp
import pytest

from podling.errors import RunError
from podling.hosts.hosts import Hosts
from podling.run import checkpoint, manifest, meeting
from podling.run.checkpoint import Checkpoints
from podling.run.meeting import Meetings, Missed

PROCESSES = 3


@pytest.fixture
def register(monkeypatch):
    """Values by key, exchanged between threads that stand for processes; a key that lacks one fails the test."""
    given, all_here = {}, threading.Condition()

    def meet(hosts, key, value):
        with all_here:
            assert hosts.process not in given.setdefault(key, {}), "a key is used once"
            given[key][hosts.process] = value
            all_here.notify_all()
            assert all_here.wait_for(lambda: len(given[key]) == PROCESSES, timeout=10), f"nobody came to {key}"
            return [given[key][process] for process in range(PROCESSES)]

    monkeypatch.setattr(meeting, "meet", meet)


def save(meetings: Meetings, step: int, fails_before: int | None, outcome: dict, process: int) -> None:
    """What Orbax and the commit thread do: two barriers, an error before one of them or none."""
    meetings.begin(step)
    try:
        for number in (1, 2):
            if fails_before == number:
                raise OSError(28, "No space left on device")
            meetings.barrier(key=f"barrier {number}", timeout_ms=1)
        outcome[process] = ""
    except Exception as error:
        outcome[process] = meeting.cause_of(error)
        meetings.miss(outcome[process])


@pytest.mark.parametrize(("process", "barrier"), [(0, 1), (0, 2), (2, 1), (2, 2)])
def test_a_process_that_fails_takes_the_others_out_of_their_barriers(register, process, barrier):
    everyone = [Meetings(Hosts(number, PROCESSES)) for number in range(PROCESSES)]
    for step, failing in ((1, None), (2, process), (3, None)):  # the next save begins afresh
        outcome: dict[int, str] = {}
        threads = [
            threading.Thread(target=save, args=(each, step, barrier if number == failing else None, outcome, number))
            for number, each in enumerate(everyone)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        told = "No space left on device"
        expected = {n: told if n == failing else f"process {failing} of {PROCESSES}: {told}" for n in range(PROCESSES)}
        assert outcome == (dict.fromkeys(range(PROCESSES), "") if failing is None else expected)


def test_all_that_fail_alike_are_heard():
    meetings = Meetings(Hosts(1, 2))
    assert meetings.whose(["", "File too large"]) == "process 1 of 2: File too large"
    assert meetings.whose(["process 1 of 2: File too large", "File too large"]) == "process 1 of 2: File too large"
    assert meeting.cause_of(Missed("process 1 of 2: x")) == "process 1 of 2: x"


def test_nobody_enters_orbax_when_the_first_process_could_not_make_the_folder(tmp_path, monkeypatch):
    """Orbax's barriers know no failure: the others would wait there for a process that is gone."""
    monkeypatch.setattr(checkpoint, "broadcast", lambda hosts, name, value, limit_s: [False, "No space left on device"])
    second = Checkpoints(tmp_path / "checkpoints", hosts=Hosts(1, 2))
    monkeypatch.setattr(second._orbax, "save", lambda *args, **more: pytest.fail("Orbax was entered"))
    with pytest.raises(RunError, match=r"3\.partial: could not be written: No space left on device"):
        second.save(3, {"w": jnp.ones(3)}, {})


def test_who_fails_behind_the_last_barrier_looks_for_nobody_there(tmp_path, monkeypatch):
    """The others are on their way to `wait`, where they hear of it."""

    def full(*args):
        raise OSError(28, "No space left on device")

    checkpoints, missed = Checkpoints(tmp_path / "checkpoints"), []
    monkeypatch.setattr(checkpoints._meetings, "miss", missed.append)
    monkeypatch.setattr(manifest, "seal", full)
    with pytest.raises(RunError, match=r"3\.partial: could not be written: No space left on device"):
        checkpoints.save(3, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
    assert missed == []


def test_shares_of_a_checkpoint_are_all_of_it(tmp_path):
    """Each file is checked by one process: a flipped bit is found by exactly one of them."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, {f"w{index}": jnp.full(100, index) for index in range(3)}, {})
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "1"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != manifest.NAME]
    assert len(files) > PROCESSES
    for path in files:
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:] if good else b"x")
        found = 0
        for process in range(PROCESSES):
            try:
                manifest.verify(folder, share=(process, PROCESSES))
            except manifest.Damaged as error:
                assert str(path.relative_to(folder)) in str(error)
                found += 1
        assert found == 1, path
        path.write_bytes(good)
