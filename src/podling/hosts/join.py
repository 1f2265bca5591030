"""The beginning and the end of a run of several processes.

Process 0 opens its register (`register.py`) at `--coordinator`, and everybody sits down there. Who is missing, twice
there or unreachable is said in words before JAX starts; then `jax.distributed` starts beside it. Nothing here costs a
single process anything: it is told so at once, and JAX is not imported.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from podling.errors import InputError, Interrupted, PodlingError, Problem, RunError, raise_if
from podling.hosts.cluster import Place, find_cluster
from podling.hosts.hosts import ALONE, ARRIVAL_S, Hosts, broadcast, exchange
from podling.hosts.member import Member
from podling.hosts.register import Register
from podling.hosts.relay import relay

OWN_S = 3.0
"""An address of this machine answers sooner, if it is one."""
TELL_S = 3.0
"""A wait that is over sooner is not worth a line."""
HEARTBEAT_S = 120
"""Of JAX's own watch, which aborts in C++. It is the second line: the register notices sooner and speaks. JAX sends one
beat every half of this and gives it the other half to be answered, so it may abort after half of it already."""

Say = Callable[[str], None]

joined = False
"""This process is one of several; JAX then waits for the others when the interpreter ends in order."""


@dataclass(frozen=True)
class HostArgs:
    """What the flags said: all three, or none for what the cluster says."""

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1


def host_problems(args: HostArgs) -> list[Problem]:
    """Everything wrong with the three flags, before JAX starts."""
    if args == HostArgs() or args == HostArgs(num_processes=1):
        return []
    problems: list[Problem] = []
    given = {
        "--coordinator": bool(args.coordinator),
        "--num-processes": args.num_processes != 0,
        "--process-id": args.process_id != -1,
    }
    missing = [flag for flag, is_given in given.items() if not is_given]
    if missing:
        what = f"must be given too: {', '.join(flag for flag in given if flag not in missing)} came without"
        problems += [Problem(flag, what, "give all three, or none where a cluster says them") for flag in missing]
    if given["--coordinator"] and _host_port(args.coordinator) is None:
        what = f"{args.coordinator!r} is not host:port"
        problems.append(Problem("--coordinator", what, "where process 0 runs, for example 10.0.0.1:1234"))
    if given["--num-processes"] and args.num_processes < 1:
        problems.append(Problem("--num-processes", f"{args.num_processes} is not a number of processes"))
    if given["--process-id"] and args.process_id < 0:
        problems.append(Problem("--process-id", f"{args.process_id} is negative", "number the processes from 0"))
    elif 1 <= args.num_processes <= args.process_id:
        what = f"{args.process_id} is not below --num-processes {args.num_processes}"
        problems.append(Problem("--process-id", what, f"number the processes 0 to {args.num_processes - 1}"))
    return problems


def find(args: HostArgs) -> Place | None:
    """This process's place among several, by the flags, or else by what SLURM, Open MPI, Kubernetes or a TPU pod says.

    Returns:
        None for a process that is alone.

    Raises:
        InputError: the flags make no sense, or a cluster does not say enough.
    """
    raise_if(host_problems(args))
    if args.num_processes == 1:
        return None
    if args == HostArgs():
        return find_cluster(os.environ)
    return Place(args.process_id, args.num_processes, args.coordinator, found_by="")


def join(args: HostArgs | Place | None, say: Say, limit_s: float = ARRIVAL_S) -> Hosts:
    """Meet the other processes and start `jax.distributed`, if there is more than one.

    Args:
        args: the flags, or what `find` made of them.
        say: told what was found, and what is waited for.
        limit_s: how long the others may be late.

    Raises:
        InputError: the flags make no sense, process 0 cannot be reached, its port is taken, a number is there twice, or
            a process does not arrive.
    """
    place = find(args) if isinstance(args, HostArgs) else args
    if place is None:
        return ALONE
    register = _open_register(place) if place.process == 0 else None
    if place.process == 0:
        found = f" ({place.found_by})" if place.found_by else ""
        say(f"{place.count} processes{found}, meeting at {place.coordinator}; all must see the same run folder")
    with contextlib.ExitStack() as undo:
        if register is not None:
            undo.callback(register.close, limit_s=0.0)
            _find_oneself(place, register, limit_s if place.found_by else OWN_S)
        member = Member(_reach(place, say, limit_s), place.process, place.count)
        undo.callback(member.close)
        member.sit_down()
        hosts = Hosts(place.process, place.count, member, register)
        try:
            with _progress(say if hosts.is_first else None, member, limit_s):
                exchange(hosts, "start", None, limit_s)
        except RunError as error:
            fix = f"start all {place.count} within {limit_s:.0f} s of one another, numbered 0 to {place.count - 1}"
            raise InputError([Problem(problem.where, problem.what, fix) for problem in error.problems]) from error
        _start_jax(place, hosts)
        undo.pop_all()
    return hosts


@contextlib.contextmanager
def together(args: HostArgs | Place | None, say: Say) -> Iterator[Hosts]:
    """`join`, and an end for all: in order when the block is done, at once when it fails in this process.

    What process 0 says as well is left for it to say: the error then has no problems.

    Raises:
        RunError: instead of what the block raised, when that is because another process is gone.
    """
    hosts = join(args, say)
    try:
        yield hosts
    except Interrupted as error:  # by agreement, in every process
        hosts.leave()
        error.problems = error.problems if hosts.is_first else []
        raise
    except PodlingError as error:
        if hosts.fail(f"{error.problems[0].where}: {error.problems[0].what}"):
            error.problems = []
        raise
    except Exception as error:
        problem = hosts.explain()
        if problem is not None:
            raise RunError(problem) from error
        hosts.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    except BaseException:
        hosts.fail("interrupted")
        raise
    hosts.leave()


def _host_port(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None


def _open_register(place: Place) -> Register:
    host, port = _host_port(place.coordinator) or ("", 0)
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


def _find_oneself(place: Place, register: Register, limit_s: float) -> None:
    """The others will look for process 0 at this address, and JAX in process 0 itself does: it must lead here.

    A cluster's names may take a while to be known, so there `limit_s` is long.
    """
    host, port = _host_port(place.coordinator) or ("", 0)
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


def _reach(place: Place, say: Say, limit_s: float) -> socket.socket:
    """Connect to the register, which may start later than this process."""
    address = _host_port(place.coordinator) or ("", 0)
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


@contextlib.contextmanager
def _progress(say: Say | None, member: Member, limit_s: float) -> Iterator[None]:
    """Say who is being waited for, once, when it takes a while."""

    def tell() -> None:
        missing = ", ".join(map(str, member.missing()))
        if say is not None and missing:
            say(f"waiting for process {missing} of {member.count} to start, at most {limit_s:.0f} s")

    timer = threading.Timer(TELL_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _start_jax(place: Place, hosts: Hosts) -> None:
    """`jax.distributed`, with nothing left for it to find out."""
    host, port = _host_port(place.coordinator) or ("", 0)
    jax_port = broadcast(hosts, "JAX's port", _free_port(host, port + 1) if hosts.is_first else None)
    global joined
    joined = True
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away
    address = f"{host}:{jax_port}" if hosts.is_first else f"127.0.0.1:{relay(host, jax_port)}"
    try:
        jax.distributed.initialize(
            address,
            hosts.count,
            hosts.process,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(ARRIVAL_S),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=30,
        )
    except RuntimeError as error:
        what = f"jax.distributed did not start: {str(error).splitlines()[0]}"
        raise RunError(Problem(str(hosts), what, "run the same command again")) from error
    exchange(hosts, "JAX's start", None)


def _free_port(host: str, wish: int) -> int:
    """`wish` if it is free, so that a firewall needs two ports open, or else any."""
    for port in (wish, 0):
        with contextlib.suppress(OSError, OverflowError), _listen(host, port) as probe:
            return probe.getsockname()[1]
    raise RunError(Problem("--coordinator", "this machine has no free port"))


def quiet_gloo() -> None:
    """Drop what Gloo writes to file descriptor 1, a line for each group of devices.

    What Python prints still goes to stdout, if it uses `sys.stdout` as it is from now on.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        if sys.stdout.fileno() == 1:
            sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace", buffering=1)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
