"""Where process 0 is: listening there, finding oneself there, reaching it from elsewhere."""

import contextlib
import errno
import json
import socket
import time
from collections.abc import Callable

from podling.errors import InputError, Problem, RunError
from podling.hosts.cluster import Place
from podling.hosts.register import Register

OWN_S = 3.0
"""An address of this machine answers sooner, if it is one."""
TELL_S = 3.0
"""A wait that is over sooner is not worth a line."""

Say = Callable[[str], None]


def host_port(text: str) -> tuple[str, int] | None:
    """`10.0.0.1:1234` or `[::1]:1234` in its two parts; None when it is neither."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None


def open_register(place: Place) -> Register:
    """Process 0's.

    Raises:
        InputError: it cannot listen on that port.
    """
    host, port = host_port(place.coordinator) or ("", 0)
    try:
        return Register(_listen(host, port), place.count)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InputError(Problem("--coordinator", f"cannot listen on port {port}: {error.strerror}")) from error
        what = f"port {port} of this machine is taken"
        fix = "choose another port, the same in every process; a run that is still there may hold it"
        raise InputError(Problem("--coordinator", what, fix)) from error


def _listen(host: str, port: int) -> socket.socket:
    """On every address of this machine, unless the run is on this machine alone."""
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def find_oneself(place: Place, register: Register, limit_s: float) -> None:
    """The others will look for process 0 at this address, and JAX in process 0 itself does: it must lead here.

    A cluster's names may take a while to be known, so there `limit_s` is long.

    Raises:
        InputError: it does not.
    """
    host, port = host_port(place.coordinator) or ("", 0)
    until = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=OWN_S) as link, link.makefile("rb") as lines:
                link.sendall(b'{"whose": ""}\n')
                if json.loads(lines.readline()) == {"whose": register.word}:
                    return
            why = "something else answers there"
        except ValueError:
            why = "something else answers there"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    what = f"process 0 listens on port {port}, and does not find itself at {host}: {why}"
    fix = f"give an address of the machine that process 0 runs on{_own_address(port)}; the same in every process"
    raise InputError(Problem("--coordinator", what, fix))


def _own_address(port: int) -> str:
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return f", such as {address}:{port}"
    return ""


def reach(place: Place, say: Say, limit_s: float) -> socket.socket:
    """Connect to the register, which may start later than this process.

    Raises:
        InputError: not within `limit_s`.
    """
    address = host_port(place.coordinator) or ("", 0)
    if place.process == 0:
        address = ("127.0.0.1", address[1])
    began, told = time.monotonic(), False
    until = began + limit_s
    while True:
        try:
            return socket.create_connection(address, timeout=max(1.0, min(10.0, until - time.monotonic())))
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() >= until:
            what = f"process 0 cannot be reached at {place.coordinator} after {limit_s:.0f} s: {why}"
            fix = "is it started, and is this its address and port? Does a firewall stand between?"
            raise InputError(Problem("--coordinator", what, fix))
        if not told and time.monotonic() > began + TELL_S:
            say(f"process {place.process} waits for process 0 at {place.coordinator}, at most {limit_s:.0f} s ({why})")
            told = True
        time.sleep(0.2)


def free_port(host: str, wish: int) -> int:
    """`wish` if it is free, so that a firewall needs two ports open, or else any.

    Raises:
        RunError: there is none.
    """
    for port in (wish, 0):
        with contextlib.suppress(OSError, OverflowError), _listen(host, port) as probe:
            return probe.getsockname()[1]
    raise RunError(Problem("--coordinator", "this machine has no free port"))
