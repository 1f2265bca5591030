"""Joining: who is missing, which address or port is wrong, who else answers there; and the relay."""

import json
import socket
import threading
import time

import pytest

from podling.errors import InputError
from podling.hosts import address
from podling.hosts import join as joining
from podling.hosts.cluster import Place
from podling.hosts.join import HostArgs, join
from podling.hosts.register import SILENT_S, Register
from podling.hosts.relay import relay


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_too_few_arrive() -> None:
    said: list[str] = []
    with pytest.raises(InputError) as error:
        join(HostArgs(f"127.0.0.1:{free_port()}", 3, 0), said.append, limit_s=1)
    text = str(error.value)
    assert (
        "process 1 of 3 has not arrived after 1 s; process 2 of 3 has not arrived after 1 s; waiting at: start" in text
    )
    assert "start all 3 within 1 s of one another" in text
    assert said[-1] == "waiting for process 1, 2 of 3 to start, at most 1 s"


def test_coordinator_unreachable() -> None:
    said: list[str] = []
    port = free_port()
    with pytest.raises(InputError, match=f"cannot be reached at 127.0.0.1:{port} after 1 s: Connection refused"):
        join(HostArgs(f"127.0.0.1:{port}", 2, 1), said.append, limit_s=1)
    assert said == [f"process 1 waits for process 0 at 127.0.0.1:{port}, at most 1 s (Connection refused)"]


def test_no_such_host() -> None:
    with pytest.raises(InputError, match="cannot be reached at no-such-host.invalid:1 "):
        join(HostArgs("no-such-host.invalid:1", 2, 1), lambda text: None, limit_s=0.5)


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of this machine is taken"):
            join(HostArgs(f"127.0.0.1:{port}", 2, 0), print)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])  # an address of no machine (RFC 5737)
def test_the_first_process_does_not_find_itself(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "OWN_S", 0.5)
    port = free_port()
    with pytest.raises(InputError, match=f"does not find itself at {host}: ") as error:
        join(HostArgs(f"{host}:{port}", 2, 0), print)
    assert error.value.problems[0].where == "--coordinator"
    assert "give an address of the machine that process 0 runs on" in str(error.value)


def test_the_first_process_finds_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "OWN_S", 0.3)
    mine, other = (Register(socket.create_server(("127.0.0.1", 0)), 2) for _ in range(2))
    place = Place(0, 2, f"127.0.0.1:{other.listener.getsockname()[1]}", "")
    with pytest.raises(InputError, match="something else answers there"):
        address.find_oneself(place, mine, 0.3)
    address.find_oneself(place, other, 0.3)


def test_something_else_answers_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            link, _ = other.accept()
            link.recv(1000)
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            link.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(InputError, match="it is not process 0 of a podling run"):
            join(HostArgs(f"127.0.0.1:{other.getsockname()[1]}", 2, 1), print)


def test_the_relay_passes_on_and_stays_open_when_the_far_end_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        near_end = ("127.0.0.1", relay("127.0.0.1", far.getsockname()[1]))
        near = socket.create_connection(near_end)
        link, _ = far.accept()
        later = socket.create_connection(near_end)
        far.accept()[0].close()
        near.sendall(b"ping")
        assert link.recv(10) == b"ping"
        link.sendall(json.dumps([1]).encode())
        assert near.recv(10) == b"[1]"
        link.close()
    for _ in range(3):  # JAX goes on sending its heartbeats
        near.sendall(b"beat")
        time.sleep(0.1)
    near.settimeout(0.5)
    with pytest.raises(TimeoutError):
        near.recv(1)
    near.close()
    later.close()


def test_podling_speaks_before_jax_may_abort() -> None:
    assert SILENT_S + 10 < joining.HEARTBEAT_S / 2
