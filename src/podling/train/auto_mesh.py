"""`--mesh auto`: the mesh with the least traffic that holds the state and divides model and batch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from podling.config import Config, ModelConfig
from podling.errors import Problem, raise_if
from podling.files import show_binary
from podling.model.fit import fits, mesh_problems
from podling.model.spec import param_specs
from podling.parallel.axes import MESH_AXES, factorisations, mesh_text, read_mesh
from podling.parallel.mesh import abstract_mesh, storage_sharding
from podling.train.batch_plan import USABLE, row_bytes

BYTES_PER_PARAMETER = 16  # the weight, its two moments and its gradient, in float32


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
    """Pure data if a device holds the whole state; else the smallest fsdp that makes it fit, and only then tensor.

    Of the meshes that fit, one that keeps fsdp and tensor between joined devices comes first: they send something for
    every layer, and data once a step.

    Raises:
        InputError: no mesh of these devices divides model and batch.
    """
    possible = [sizes for sizes in factorisations(machine.devices) if fits(config, sizes)]
    if not possible:
        raise_if(_impossible(config, machine.devices))
    row = row_bytes(config, itemsize)
    usable = USABLE * machine.device_bytes

    def needs(sizes: Mapping[str, int]) -> float:
        return state_bytes(config.model, sizes) + row / sizes["tensor"]

    def preference(sizes: Mapping[str, int]) -> tuple[float, ...]:
        inside = machine.joined % (sizes["fsdp"] * sizes["tensor"]) == 0
        short = max(0.0, needs(sizes) - usable)  # when nothing holds it, the mesh that comes nearest
        return short, not inside, sizes["tensor"], sizes["fsdp"]

    best = min(possible, key=preference)
    if machine.devices == 1 and needs(best) <= usable:
        return MeshChoice(best, "")
    return MeshChoice(best, _why(config, machine, best, needs(best), usable))


def state_bytes(model: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Bytes of weights, moments and gradients on each device: every leaf's share, as the spec tree and table say."""
    mesh = abstract_mesh(sizes)
    return sum(
        BYTES_PER_PARAMETER * math.prod(storage_sharding(mesh, leaf.axes).shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(param_specs(model))
    )


def _why(config: Config, machine: Machine, sizes: dict[str, int], needed: float, usable: float) -> str:
    whole = state_bytes(config.model, dict.fromkeys(MESH_AXES, 1))
    device = show_binary(machine.device_bytes)
    if needed > usable:
        state = state_bytes(config.model, sizes)
        train = config.train
        saves = [
            flag
            for flag, on in (("--train.remat full", train.remat == "full"), ("--train.loss-chunk", train.loss_chunk))
            if not on
        ]
        advice = " and ".join(saves) if saves and state < usable else "more devices, or a smaller model, would help"
        return (
            f"state ({show_binary(state)}) and one row need about {show_binary(needed)} on each device, and {device} "
            f"is all it has: expect to run out of memory ({advice})"
        )
    if sizes["fsdp"] == sizes["tensor"] == 1:
        return f"the state ({show_binary(whole)}) fits on every device, so only gradients travel"
    share = f"{show_binary(state_bytes(config.model, sizes))} on each"
    fewer = {**dict.fromkeys(MESH_AXES, 1), "data": machine.devices}
    if problems := mesh_problems(config, fewer, machine.devices):
        return f"data={machine.devices} alone does not do: {problems[0].what}; the state is {share}"
    over = sizes["fsdp"] * sizes["tensor"]
    return (
        f"{BYTES_PER_PARAMETER} bytes a parameter are {show_binary(whole)}, too much for a device's {device} with "
        f"activations beside them; sharded over {over} they are {share}"
    )


def _impossible(config: Config, devices: int) -> list[Problem]:
    """Why no mesh of all devices will do, and how many would."""
    fewer = [count for count in range(devices - 1, 0, -1) if any(fits(config, mesh) for mesh in factorisations(count))]
    what = f"no mesh of all {devices} devices divides this model and batch, and none is left idle"
    fix = f"show JAX {fewer[0]} of them, or change what follows so that data={devices} fits" if fewer else ""
    sizes = {**dict.fromkeys(MESH_AXES, 1), "data": devices}
    return [Problem("--mesh", what, fix), *mesh_problems(config, sizes, devices)]
