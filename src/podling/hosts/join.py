"""The beginning and the end of a run of several processes.

Process 0 opens its register (`register.py`) at `--coordinator`, and everybody sits down there. Who is missing, twice
there or unreachable is said in words before JAX starts; then `jax.distributed` starts beside it. Nothing here costs a
single process anything: it is told so at once, and JAX is not imported.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from podling.errors import InputError, Interrupted, PodlingError, Problem, RunError, raise_if
from podling.hosts import address
from podling.hosts.address import Say, find_oneself, free_port, host_port, open_register, reach
from podling.hosts.cluster import Place, find_cluster
from podling.hosts.hosts import ALONE, ARRIVAL_S, Hosts, broadcast, exchange
from podling.hosts.member import Member
from podling.hosts.relay import relay

HEARTBEAT_S = 120
"""Of JAX's own watch, which aborts in C++. It is the second line: the register notices sooner and speaks. JAX sends one
beat every half of this and gives it the other half to be answered, so it may abort after half of it already."""

joined = False
"""This process is one of several; JAX then waits for the others when the interpreter ends in order."""


@dataclass(frozen=True)
class HostArgs:
    """What the flags said: all three, or none for what the cluster says."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def host_problems(args: HostArgs) -> list[Problem]:
    """Everything wrong with the three flags, before JAX starts."""
    if args == HostArgs() or args == HostArgs(num_processes=1):
        return []
    problems: list[Problem] = []
    coordinator, count, process = args.coordinator, args.num_processes, args.process_id
    given = {"--coordinator": coordinator, "--num-processes": count, "--process-id": process}
    missing = [flag for flag, value in given.items() if value is None]
    if missing:
        what = f"must be given too: {', '.join(flag for flag in given if flag not in missing)} came without"
        problems += [Problem(flag, what, "give all three, or none where a cluster says them") for flag in missing]
    if coordinator is not None and host_port(coordinator) is None:
        what = f"{coordinator!r} is not host:port"
        problems.append(Problem("--coordinator", what, "where process 0 runs, for example 10.0.0.1:1234"))
    if count is not None and count < 1:
        fix = "count all processes of the run; 1: this one alone"
        problems.append(Problem("--num-processes", f"{count} is less than 1", fix))
    if process is not None and process < 0:
        problems.append(Problem("--process-id", f"{process} is negative", "number the processes from 0"))
    elif process is not None and count is not None and 1 <= count <= process:
        what = f"{process} is not below --num-processes {count}"
        problems.append(Problem("--process-id", what, f"number the processes 0 to {count - 1}"))
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
    if args.process_id is None or args.num_processes is None or args.coordinator is None:  # none of them is given
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
    register = open_register(place) if place.process == 0 else None
    if place.process == 0:
        found = f" ({place.found_by})" if place.found_by else ""
        say(f"{place.count} processes{found}, meeting at {place.coordinator}; all must see the same run folder")
    with contextlib.ExitStack() as undo:
        if register is not None:
            undo.callback(register.close, limit_s=0.0)
            find_oneself(place, register, limit_s if place.found_by else address.OWN_S)
        member = Member(reach(place, say, limit_s), place.process, place.count)
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
def together(args: HostArgs | Place | None, say: Say, *, beside_first: bool = False) -> Iterator[Hosts]:
    """`join`, and an end for all: in order when the block is done, at once when it fails in this process.

    What process 0 says as well is left for it to say: the error then only points there.

    Args:
        args: as of `join`.
        say: as of `join`.
        beside_first: what process 0 says is read next to what this process says, so not even that is needed.

    Raises:
        RunError: instead of what the block raised, when that is because another process is gone.
    """
    hosts = join(args, say)
    try:
        yield hosts
    except Interrupted as error:  # by agreement, in every process
        hosts.leave()
        if not hosts.is_first:
            error.problems = _as_first_says(hosts, error, beside_first)
        raise
    except PodlingError as error:
        if hosts.fail(f"{error.problems[0].where}: {error.problems[0].what}"):
            error.problems = _as_first_says(hosts, error, beside_first)
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


def _as_first_says(hosts: Hosts, error: PodlingError, beside_first: bool) -> list[Problem]:
    if beside_first or not error.problems:
        return []
    more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
    return [Problem(str(hosts), f"process 0 says why: {error.problems[0].where}: {error.problems[0].what}{more}")]


@contextlib.contextmanager
def _progress(say: Say | None, member: Member, limit_s: float) -> Iterator[None]:
    """Say who is being waited for, once, when it takes a while."""

    def tell() -> None:
        missing = ", ".join(map(str, member.missing()))
        if say is not None and missing:
            say(f"waiting for process {missing} of {member.count} to start, at most {limit_s:.0f} s")

    timer = threading.Timer(address.TELL_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _start_jax(place: Place, hosts: Hosts) -> None:
    """`jax.distributed`, with nothing left for it to find out."""
    host, port = host_port(place.coordinator) or ("", 0)
    jax_port = broadcast(hosts, "JAX's port", free_port(host, port + 1) if hosts.is_first else None)
    global joined
    joined = True
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away
    jax_address = f"{host}:{jax_port}" if hosts.is_first else f"127.0.0.1:{relay(host, jax_port)}"
    try:
        jax.distributed.initialize(
            jax_address,
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
