"""`--mesh auto`: the mesh with the least traffic that holds the state and divides model and batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podling.config import Config
from podling.cost.shares import held_params
from podling.cost.step_bytes import bytes_per_parameter
from podling.errors import Problem, raise_if
from podling.files import show_binary
from podling.model.fit import batch_problems, fits, mesh_problems
from podling.parallel.axes import MESH_AXES, batch_ways, factorisations, mesh_text, read_mesh
from podling.train.batch_plan import USABLE, micro_batch_bytes

HELD = "weights, moments, gradients and their copies"


@dataclass(frozen=True)
class Machine:
    """What a mesh is chosen for."""

    devices: int
    joined: int
    """Devices between which sending is fast: those of one process, or of one TPU slice, whatever its hosts."""
    device_bytes: int
    """Memory of one device."""


@dataclass(frozen=True)
class MeshChoice:
    """A mesh, and why podling chose it (empty when the person did, or when there is only one device)."""

    sizes: dict[str, int]
    why: str

    @property
    def text(self) -> str:
        """As after `--mesh`."""
        return mesh_text(self.sizes)


def joined(devices: Sequence[Any]) -> int:
    """How many of JAX's devices, of all processes, are joined: the smallest number in a process or a TPU slice."""
    return min(Counter(getattr(device, "slice_index", device.process_index) for device in devices).values())


def settle_mesh(config: Config, machine: Machine, itemsize: int) -> MeshChoice:
    """The mesh that `--mesh` names, or for `auto` the one that suits model, batch and machine.

    Args:
        config: resolved.
        machine: the devices to lay it over; all of them are used.
        itemsize: bytes of the compute dtype.

    Raises:
        InputError: the mesh does not fit, with all that is wrong; or no mesh of these devices does.
    """
    if config.run.mesh == "auto":
        return choose_mesh(config, machine, itemsize)
    sizes, problems = read_mesh(config.run.mesh)
    raise_if(problems or mesh_problems(config, sizes, machine.devices))
    return MeshChoice(sizes, "")


def choose_mesh(config: Config, machine: Machine, itemsize: int) -> MeshChoice:
    """Pure data if all of it fits on a device; else the smallest fsdp that makes it fit, and only then tensor.

    Of the meshes that fit, one that keeps fsdp and tensor between joined devices comes first: they send something for
    every layer, and data once a step.

    Raises:
        InputError: no mesh of these devices divides model and batch.
    """
    possible = [sizes for sizes in factorisations(machine.devices) if fits(config, sizes)]
    if not possible:
        raise_if(_impossible(config, machine.devices))
    usable = USABLE * machine.device_bytes

    def preference(sizes: Mapping[str, int]) -> tuple[float, ...]:
        inside = machine.joined % (sizes["fsdp"] * sizes["tensor"]) == 0
        # When nothing holds it, the mesh that comes nearest.
        short = max(0.0, _need(config, sizes, itemsize, usable).total - usable)
        return short, not inside, sizes["tensor"], sizes["fsdp"]

    best = min(possible, key=preference)
    needed = _need(config, best, itemsize, usable)
    if machine.devices == 1 and needed.total <= usable:
        return MeshChoice(best, "")
    return MeshChoice(best, _why(config, machine, best, needed))


@dataclass(frozen=True)
class Need:
    """What training takes of each device, in bytes."""

    per_parameter: int
    held: int
    """For the parameters that it holds: weights, moments, gradients and their copies."""
    total: int


def _need(config: Config, sizes: Mapping[str, int], itemsize: int, usable: float) -> Need:
    """With the micro-batch that was asked for; else in one piece where that fits, or else the least that does."""
    ways, rows = batch_ways(sizes), config.train.batch_tokens // config.model.context

    def need(micro_batch: int) -> Need:
        each = bytes_per_parameter(itemsize, accumulates=micro_batch < rows)
        total = micro_batch_bytes(config, sizes, micro_batch, itemsize)
        return Need(each, each * held_params(config.model, **sizes), total)

    if config.train.micro_batch:
        return need(config.train.micro_batch)
    whole = need(rows)
    return whole if whole.total <= usable else min(whole, need(ways), key=lambda found: found.total)


def _why(config: Config, machine: Machine, sizes: dict[str, int], needed: Need) -> str:
    usable, device = USABLE * machine.device_bytes, show_binary(machine.device_bytes)
    planned = f"of a device's {device} podling plans with three quarters ({show_binary(usable)})"
    if needed.total > usable:
        train = config.train
        on = {"--train.remat full": train.remat == "full", "--train.loss-chunk": train.loss_chunk > 0}
        saves = [flag for flag in on if not on[flag]]
        advice = (
            " and ".join(saves) if saves and needed.held < usable else "more devices, or a smaller model, would help"
        )
        outlook = "expect it to run" if needed.total > machine.device_bytes else "it may run"
        return (
            f"{HELD} ({show_binary(needed.held)}) and activations need about {show_binary(needed.total)} on each "
            f"device, and {planned}, the rest being for what the compiler adds: {outlook} out of memory ({advice})"
        )
    alone: dict[str, int] = {axis: 1 for axis in MESH_AXES}
    whole = show_binary(needed.per_parameter * held_params(config.model))
    if sizes["fsdp"] == sizes["tensor"] == 1:
        return f"{HELD} ({whole}) fit on every device, so only gradients travel"
    share = f"{show_binary(needed.held)} on each"
    if problems := mesh_problems(config, {**alone, "data": machine.devices}, machine.devices):
        return f"data={machine.devices} alone does not do: {problems[0].what}; {HELD} are {share}"
    return (
        f"{HELD}, {needed.per_parameter} bytes a parameter, are {whole}, and {planned} for them and activations; "
        f"sharded over {sizes['fsdp'] * sizes['tensor']} they are {share}"
    )


def _impossible(config: Config, devices: int) -> list[Problem]:
    """Why no mesh of all devices will do, and how many would: what keeps the batch from the simplest of them."""
    fewer = [count for count in range(devices - 1, 0, -1) if any(fits(config, mesh) for mesh in factorisations(count))]
    first, *more = batch_problems(config, {**dict.fromkeys(MESH_AXES, 1), "data": devices})
    what = f"no mesh of all {devices} devices divides this model and batch, and none is left idle: {first.what}"
    others = f"\n    or show JAX {fewer[0]} of them (on a CPU: JAX_NUM_CPU_DEVICES={fewer[0]})" if fewer else ""
    return [Problem(first.where, what, first.fix + others), *more]
