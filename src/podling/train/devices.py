"""The device gate of one process or several, and proof that they hold one batch between them."""

import socket

import jax

from podling.config import Config
from podling.data.shards import Prepared
from podling.errors import Problem, RunError
from podling.hosts.waits import COMPILE_S
from podling.parallel.device import measure_cpu_flops, select_devices
from podling.train.batch_plan import device_memory_bytes
from podling.train.progress import Reporter
from podling.train.session import Session, Shared
from podling.train.together import Together


def open_session(config: Config, prepared: Prepared, reporter: Reporter, together: Together) -> Session:
    """`Session.open` in every process, with one mesh and one batch plan.

    Raises:
        InputError: in all processes, when the devices of one are not there or mesh and batch do not fit.
    """
    memory = 0
    with together.gate("devices", COMPILE_S):
        select_devices(config.run.device)
        memory = device_memory_bytes(jax.local_devices())
    places = together.exchange("memory of the devices", [socket.gethostname(), memory])
    names, name = [name for name, _ in places], places[together.hosts.process][0]
    cpu_flops = None
    if jax.default_backend() == "cpu":  # processes of one machine share its memory and its cores
        places = [[name, memory // names.count(name)] for name, memory in places]
        cpu_flops = _cpu_flops(names, together)
    shared = Shared(min(memory for _, memory in places), names.count(name), cpu_flops)
    with together.gate("mesh", COMPILE_S):
        session = Session.open(config, prepared, reporter, shared)
    together.agree("one mesh", {"mesh": str(session.mesh.device_ids.tolist()), "batch": str(session.plan)})
    return session


def _cpu_flops(names: list[str], together: Together) -> float | None:
    """This process's share of its machine's CPU, which one process measures while the others of the machine wait.

    Args:
        names: of the machine of each process.
        together: the processes, which all call this.
    """
    if together.hosts.count == 1:
        return None  # the session measures it
    mine = together.hosts.process
    measured = measure_cpu_flops(jax.local_devices()[0]) if names.index(names[mine]) == mine else 0.0
    told = together.exchange("speed of the CPU", measured, COMPILE_S)
    return told[names.index(names[mine])] / names.count(names[mine])


def check_batch(session: Session, step: int, together: Together) -> None:
    """Make sure that all processes mean, and their devices hold, the same batch for a step.

    Raises:
        InputError: their data or their order differ.
        RunError: the devices hold something else than the batch.
    """
    if together.hosts.count == 1:
        return
    together.agree("the first batch", {"first batch": session.batches.digest(step)})
    with together.waits("the first batch on the devices", COMPILE_S):
        wanted, held = session.batch_on_devices(step)
    if wanted != held:
        what = f"the devices of all processes hold a batch with checksum {held:08x}, and it should be {wanted:08x}"
        raise RunError(Problem(f"batch of step {step + 1}", what, "this is a bug in podling: please report it"))
