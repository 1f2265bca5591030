"""The register and its members, all in one process: who is late, lost, failed or twice there."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from podling.errors import InputError, Problem, RunError
from podling.hosts import join as joining
from podling.hosts.cluster import Place
from podling.hosts.hosts import ALONE, Hosts, agree, broadcast, exchange
from podling.hosts.join import together
from podling.hosts.member import Member
from podling.hosts.register import Register
from podling.hosts.waits import Waits

SILENT_S = 1.5


class Room:
    """A register, and members that note what would have ended their process."""

    def __init__(self, count: int):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.register = Register(self.listener, count, SILENT_S)
        self.count = count
        self.links: dict[int, socket.socket] = {}
        self.ends: dict[int, list[Problem]] = {}

    def enter(self, process: int, count: int | None = None) -> Hosts:
        link = self.links[process] = socket.create_connection(("127.0.0.1", self.port))
        member = Member(link, process, count or self.count, SILENT_S)
        self.ends[process] = []
        member.end = self.ends[process].append
        member.sit_down()
        return Hosts(process, self.count, member, self.register if process == 0 else None)

    def enter_all(self) -> list[Hosts]:
        return [self.enter(process) for process in range(self.count)]

    def cut(self, process: int) -> None:
        """What the kernel does when a process is killed."""
        self.links[process].shutdown(socket.SHUT_RDWR)

    def end_of(self, process: int, limit_s: float = 5) -> str:
        until = time.monotonic() + limit_s
        while not self.ends[process] and time.monotonic() < until:
            time.sleep(0.01)
        assert self.ends[process], f"process {process} would have waited for ever"
        return str(self.ends[process][0])


@pytest.fixture
def room() -> Iterator[Room]:
    this = Room(3)
    yield this
    for link in this.links.values():
        link.close()
    this.listener.close()


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, all at once."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return results


def test_everybody_gets_every_value_in_order(room: Room) -> None:
    hosts = room.enter_all()
    for word in ("a", "b"):
        told = in_threads(*(lambda h=h, w=word: exchange(h, "words", f"{w}{h.process}") for h in hosts))
        assert told == [[f"{word}0", f"{word}1", f"{word}2"]] * 3
    assert in_threads(*(lambda h=h: broadcast(h, "mesh", {"of": h.process}) for h in hosts)) == [{"of": 0}] * 3


def test_alone_nothing_is_asked() -> None:
    assert exchange(ALONE, "words", 1) == [1]
    assert broadcast(ALONE, "words", 1) == 1
    agree(ALONE, "facts", {"a": "1"})
    with Waits(ALONE)("first step", 0.0):
        time.sleep(0.01)


def test_facts_that_differ_are_named_in_every_process(room: Room) -> None:
    facts = [{"--lr": "0.1", "--seed": "1"}, {"--lr": "0.1", "--seed": "2"}, {"--lr": "0.2", "--seed": "1", "new": "x"}]
    hosts = room.enter_all()
    results = in_threads(*(lambda h=h: agree(h, "configuration", facts[h.process]) for h in hosts))
    for error in results:
        assert isinstance(error, InputError)
        text = str(error)
        assert "--lr: is 0.2 in process 2, and 0.1 in process 0" in text
        assert "--seed: is 2 in process 1, and 1 in process 0" in text
        assert "new: is x in process 2, and not there in process 0" in text
    assert in_threads(*(lambda h=h: agree(h, "again", {"--lr": "0.1"}) for h in hosts)) == [None] * 3


def test_who_has_not_arrived_is_named_with_where_it_is(room: Room) -> None:
    hosts = room.enter_all()
    assert hosts[2].member is not None

    def late() -> None:
        with Waits(hosts[2])("reading the text", None):
            time.sleep(1.5)

    def early(process: int) -> Any:
        with Waits(hosts[process])("reading the text", None):
            pass
        return exchange(hosts[process], "first step", None, 0.5)

    errors = in_threads(late, lambda: early(0), lambda: early(1))[1:]
    for process, error in enumerate(errors):
        assert isinstance(error, RunError)
        expected = "process 2 of 3 has not arrived after 1 s (it is at: reading the text); waiting at: first step"
        assert f"process {process} of 3: {expected}" in str(error)


def test_a_wait_that_hangs_ends_the_process(room: Room) -> None:
    hosts = room.enter_all()
    with Waits(hosts[0])("first step", 0.4):
        text = room.end_of(0)
    assert "process 1 of 3 has not arrived after 0 s (it is at: start); process 2 of 3 has not" in text
    assert "waiting at: first step" in text


def test_a_wait_that_all_have_reached_has_its_limit_too(room: Room) -> None:
    hosts = room.enter_all()
    waits = [Waits(h)("step 7", 0.5) for h in hosts]
    for wait in waits:
        wait.__enter__()
    assert "all 3 processes have arrived, and it is not over after" in room.end_of(1)
    for wait in waits:
        wait.__exit__(None, None, None)


def test_a_wait_in_time_ends_nothing(room: Room) -> None:
    hosts = room.enter_all()
    for h in hosts:
        with Waits(h)("step 7", 0.3):
            pass
    time.sleep(0.6)
    assert not any(room.ends.values())


def test_a_killed_process_is_noticed_everywhere_with_the_last_checkpoint(room: Room) -> None:
    hosts = room.enter_all()
    Waits(hosts[0]).ask_for_saved(lambda: 500)
    waits = [Waits(h)("step 512", None) for h in hosts[:2]]
    for wait in waits:
        wait.__enter__()
    room.cut(2)
    lost = "process 2 of 3 was lost (its connection closed); waiting at: step 512"
    assert room.end_of(0) == f"process 0 of 3: {lost}; the last checkpoint is of step 500\n    {CARRY_ON}"
    assert room.end_of(1) == f"process 1 of 3: {lost}\n    {CARRY_ON}"


CARRY_ON = "run the same command to carry on"


def test_a_killed_first_process_is_noticed_too(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.enter_all()
    monkeypatch.setattr(room.register, "_tell_table", lambda: None)  # the killed say nothing more
    monkeypatch.setattr(room.register, "_hear", lambda process, message: None)
    room.listener.close()
    for process in room.links:  # the register's side of every connection
        room.register._seats[process].link.shutdown(socket.SHUT_RDWR)
    for process in (1, 2):
        assert f"process {process} of 3: process 0 of 3 was lost (its connection" in room.end_of(process)


def test_silence_is_a_loss(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = room.enter_all()
    assert hosts[1].member is not None
    monkeypatch.setattr(hosts[1].member, "_report", lambda: None)  # as when its machine is frozen
    text = room.end_of(0)
    assert "process 1 of 3 was lost (no sign of life for 2 s); after: start" in text
    assert "process 1 of 3 was lost (no sign" in room.end_of(2)


def test_a_register_that_is_silent_is_a_loss(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.enter_all()
    monkeypatch.setattr(room.register, "_hear", lambda process, message: None)
    assert "process 0 of 3 was lost (no sign of life" in room.end_of(1)


def test_a_failure_reaches_the_others_after_a_moment_for_their_own_words(room: Room) -> None:
    hosts = room.enter_all()
    began = time.monotonic()
    assert not hosts[1].fail("--out runs/a: No space left on device")
    text = room.end_of(0)
    assert time.monotonic() - began > 0.25
    assert "process 1 of 3 stopped: --out runs/a: No space left on device" in text
    assert not room.ends[1]


def test_failing_alike_is_said_by_the_first(room: Room) -> None:
    hosts = room.enter_all()
    assert in_threads(*(lambda h=h: h.fail("--mesh: is wrong") for h in hosts)) == [False, True, True]


@pytest.mark.parametrize("beside_first", [False, True])
def test_others_point_to_what_the_first_says(room: Room, monkeypatch: pytest.MonkeyPatch, beside_first: bool) -> None:
    hosts = room.enter_all()
    monkeypatch.setattr(joining, "join", lambda place, say: hosts[place.process])

    def run(process: int) -> list[str]:
        place = Place(process, 3, "127.0.0.1:1", "")
        with pytest.raises(InputError) as error, together(place, print, beside_first=beside_first):
            raise InputError([Problem("--lr", "differs", "mend it"), Problem("--seed", "differs too")])
        return list(map(str, error.value.problems))

    told = in_threads(*(lambda n=n: run(n) for n in range(3)))
    assert told[0] == ["--lr: differs\n    mend it", "--seed: differs too"]
    pointer = "process {} of 3: process 0 says why: --lr: differs (and 1 more)"
    assert told[1:] == ([[], []] if beside_first else [[pointer.format(1)], [pointer.format(2)]])


def test_an_error_because_another_is_gone_is_told_as_that(room: Room) -> None:
    hosts = room.enter_all()

    def collective() -> None:
        with Waits(hosts[0])("step 3", None):
            room.cut(2)
            raise ValueError("Gloo all-reduce failed: Connection closed by peer")

    (error,) = in_threads(collective)
    assert isinstance(error, RunError)
    assert "process 2 of 3 was lost (its connection closed); waiting at: step 3" in str(error)


def test_an_error_of_ones_own_stays_what_it_is(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = room.enter_all()
    assert hosts[0].member is not None
    explain = hosts[0].member.explain
    monkeypatch.setattr(hosts[0].member, "explain", lambda limit_s: explain(0.3))
    with pytest.raises(ValueError, match="mine"), Waits(hosts[0])("step 3", None):
        raise ValueError("mine")


def test_a_number_twice_and_another_count_are_refused(room: Room) -> None:
    room.enter(1)
    with pytest.raises(InputError, match="process 1 is here already") as twice:
        room.enter(1)
    assert twice.value.problems[0].where == "--process-id"
    with pytest.raises(InputError, match="is 4 here, and process 0 was started with 3"):
        room.enter(2, count=4)


def test_strangers_do_not_disturb_the_register(room: Room) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"hello": "x"}\n', b'{"at": [1, "x"]}\n', b"[1]\n", b"\xff\n"):
        with socket.create_connection(("127.0.0.1", room.port)) as link:
            link.sendall(said)
    hosts = room.enter_all()
    assert in_threads(*(lambda h=h: exchange(h, "words", 1) for h in hosts)) == [[1, 1, 1]] * 3
