"""TPU topologies by name: how many chips, how they are joined, and the devices the TPU compiler has for them.

A name is what the compiler takes (`v5e:2x4`) or what the cloud calls it (`v5e-8`). With libtpu installed (the `tpu`
extra, Linux on x86-64) JAX has the devices of any topology without one being there.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

from podling.errors import InputError, Problem, RunError

GIB = 2**30
CHILD_S = 120  # libtpu answers in seconds; on a busy machine its start takes longer


@dataclass(frozen=True)
class Kind:
    """A generation of TPU.

    Sources: dimensions, cores and pod sizes from Google Cloud's TPU system architecture pages; `hbm_gib` is what the
    compiler of libtpu 0.0.42 lets a program use of one device ("exceeds available HBM").
    """

    device_kind: str
    dims: int  # of the torus or mesh that joins the chips
    cores: int  # per chip; those of v4 and later work as one device
    hbm_gib: float
    most_chips: int
    split_cores: bool = False  # each core is a device of its own

    @property
    def devices_per_chip(self) -> int:
        return self.cores if self.split_cores else 1


KINDS = {
    "v2": Kind("TPU v2", 2, 2, 7.48, 256, split_cores=True),
    "v3": Kind("TPU v3", 2, 2, 15.48, 1024, split_cores=True),
    "v4": Kind("TPU v4", 3, 2, 30.75, 4096),
    "v5e": Kind("TPU v5 lite", 2, 1, 15.75, 256),
    "v5p": Kind("TPU v5", 3, 2, 95.74, 8960),
    "v6e": Kind("TPU v6 lite", 2, 1, 31.25, 256),
}
SYNONYMS = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e"}


@dataclass(frozen=True)
class Placed:
    """A device of a topology and where it is."""

    id: int
    coords: tuple[int, int, int]
    core: int
    process: int


@dataclass(frozen=True)
class Topology:
    """Chips of one kind joined in a grid."""

    kind: str
    shape: tuple[int, ...]
    """Chips along x, y (and z)."""

    @property
    def name(self) -> str:
        """As the TPU compiler takes it."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def chip(self) -> Kind:
        return KINDS[self.kind]

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def device_bytes(self) -> int:
        """Memory of one device that a program can use."""
        return int(self.chip.hbm_gib * GIB)

    def in_order(self) -> "list[Placed]":
        """Every device in order of its id, as the compiler numbers them: x runs fastest, hosts are 2 x 2 chips."""
        x, y, z = (*self.shape, 1)[:3]
        hosts_x, hosts_y = -(-x // 2), -(-y // 2)
        cores = range(self.chip.devices_per_chip)
        return [
            Placed(
                id=((k * y + j) * x + i) * len(cores) + core,
                coords=(i, j, k),
                core=core,
                process=(k * hosts_y + j // 2) * hosts_x + i // 2,
            )
            for k, j, i, core in product(range(z), range(y), range(x), cores)
        ]


def parse_topology(text: str) -> Topology:
    """Read `v5e:2x4`, `v4:2x2x1` or `v5e-8`.

    Raises:
        InputError: no such kind, or a shape that kind does not come in; names what is known.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?::(\d+(?:x\d+)*)|-(\d+))", text.strip().lower())
    if not match:
        raise _problem(f"{text!r} is not the name of a topology", "for example v5e:2x4, v5e-8, v6e-8, v4:2x2x1")
    kind = SYNONYMS.get(match[1], match[1])
    if kind not in KINDS:
        raise _problem(f"there is no TPU {match[1]!r}", f"known: {', '.join(KINDS)}")
    shape = tuple(map(int, match[2].split("x"))) if match[2] else _shape_of(kind, int(match[3]), text)
    topology, chip = Topology(kind, shape), KINDS[kind]
    example = "2x4" if chip.dims == 2 else "2x2x1"
    if len(shape) != chip.dims:
        raise _problem(f"chips of {kind} are joined in {chip.dims} dimensions", f"for example {kind}:{example}")
    if set(shape) != {1} and (min(shape) < 1 or shape[0] % 2 or shape[1] % 2):
        what = f"{topology.name}: a host holds 2 x 2 chips, so x and y are even"
        raise _problem(what, f"for example {kind}:{example}, or {kind}:{'x'.join('1' * chip.dims)} for one chip")
    if math.prod(shape) > chip.most_chips:
        raise _problem(f"{topology.name}: {kind} comes in at most {chip.most_chips} chips", "ask for fewer")
    return topology


def _shape_of(kind: str, count: int, text: str) -> tuple[int, ...]:
    """The shape of `v5e-8`: chips for the kinds with one core, cores for the others, as the cloud counts them."""
    chip = KINDS[kind]
    shapes = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
    if chip.dims == 3:
        shapes = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8)}
        shapes |= {256: (4, 8, 8), 512: (8, 8, 8)}
    named = {chips * chip.cores: shape for chips, shape in shapes.items()}
    if count not in named:
        near = ", ".join(f"{kind}-{size}" for size in named)
        raise _problem(
            f"{text!r} is no size of {kind}", f"known: {near}; any other as {kind}:" + "x".join("XYZ"[: chip.dims])
        )
    return named[count]


def _problem(what: str, fix: str) -> InputError:
    return InputError(Problem("--topology", what, fix))


def compiler_missing() -> str | None:
    """How to get the TPU compiler, whose devices a topology needs; None where it is installed."""
    if find_spec("libtpu"):
        return None
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return "pip install 'podling[tpu]'"
    return "on Linux x86-64, pip install 'podling[tpu]'"


def compiler_environment() -> dict[str, str]:
    """Environment of a process that uses the TPU compiler and no TPU: set it before JAX is imported."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud which TPU this is
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may hold the compiler, or a TPU
    }


def devices(topology: Topology) -> list[Any]:
    """The compiler's devices of a topology, for meshes and for ahead-of-time compilation; they can run nothing.

    Call it in a process with `compiler_environment` and libtpu.

    Raises:
        InputError: the compiler does not take the topology.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if topology.kind == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as on the real one
    try:
        found = topologies.get_topology_desc(topology_name=topology.name, platform="tpu", **options)
    except Exception as error:  # whatever libtpu says, in XLA's own exception
        what = f"the TPU compiler does not take {topology.name}: {str(error).splitlines()[0]}"
        raise InputError(Problem("--topology", what, "for example v5e:2x4")) from error
    return list(found.devices)


def placed(topology: Topology, mesh: Mapping[str, int]) -> list[Placed]:
    """The devices in the very order in which `jax.make_mesh` lays them over a mesh of these sizes.

    A process of its own asks the compiler, so that libtpu and its messages stay out of this one.

    Raises:
        RunError: the compiler gave no answer.
    """
    command = [sys.executable, "-m", "podling.layout.topology", topology.name, json.dumps(dict(mesh))]
    try:
        done = subprocess.run(
            command, env={**os.environ, **compiler_environment()}, capture_output=True, text=True, timeout=CHILD_S
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(Problem("libtpu", f"the TPU compiler gave no answer in {CHILD_S} s")) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(Problem("libtpu", f"the TPU compiler failed: {last}"))
    return [
        Placed(item["id"], tuple(item["coords"]), item["core"], item["process"])
        for item in json.loads(done.stdout.splitlines()[-1])
    ]


def _child(name: str, mesh: str) -> None:
    from podling.parallel.axes import mesh_text
    from podling.parallel.mesh import make_mesh

    arranged = make_mesh(mesh_text(json.loads(mesh)), devices(parse_topology(name))).devices.flat
    found = [
        {"id": chip.id, "coords": list(chip.coords), "core": chip.core_on_chip, "process": chip.process_index}
        for chip in arranged
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    _child(*sys.argv[1:])
