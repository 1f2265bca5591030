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

from podling.chips import CHIPS, Chip
from podling.errors import InputError, Problem, RunError

CHILD_S = 120  # libtpu answers in seconds; on a busy machine its start takes longer

SYNONYMS = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e"}

_PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16))
SHAPES = {
    "v2": ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)),
    "v3": ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)),
    "v4": (*_CUBES, (8, 16, 16), (16, 16, 16)),
    "v5e": _PLANES,
    "v5p": (*_CUBES, (8, 16, 16), (16, 16, 16), (16, 16, 24)),
    "v6e": _PLANES,
}
"""Grids of chips that the cloud has (Google Cloud's pages on each TPU version), fewest chips first.

Turned grids (4x2) are the same, and kinds joined in three dimensions also come in any multiples of 4."""


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
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def cores(self) -> int:
        """What the cloud counts: the 8 of `v4-8`, which is four chips."""
        return math.prod(self.shape) * self.chip.cores

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def device_bytes(self) -> int:
        """Memory of one device that a program can use."""
        return self.chip.hbm_bytes

    @property
    def rings(self) -> tuple[bool, ...]:
        """Whether the chips along x, y (and z) are joined in a ring, not in a line.

        Source: Google Cloud's pages on v5e and v6e (ends are joined on a full axis of 16) and on v4 and v5p (from
        4x4x4 on, on all axes or on none).
        """
        if self.chip.dims == 3:
            return (all(side % self.chip.ring == 0 for side in self.shape),) * 3
        return tuple(side >= self.chip.ring for side in self.shape)

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
    if kind not in SHAPES:
        raise _problem(f"there is no TPU {match[1]!r}", f"known: {', '.join(SHAPES)}")
    if match[2]:
        return _of_shape(kind, tuple(map(int, match[2].split("x"))))
    named = {Topology(kind, shape).cores: shape for shape in SHAPES[kind]}
    if int(match[3]) not in named:
        raise _problem(f"there is no {text.strip()}", f"known: {', '.join(f'{kind}-{size}' for size in named)}")
    return Topology(kind, named[int(match[3])])


def _of_shape(kind: str, shape: tuple[int, ...]) -> Topology:
    topology, chip, known = Topology(kind, shape), CHIPS[kind], SHAPES[kind]
    whole_cubes = len(shape) == chip.dims == 3 and all(side % 4 == 0 for side in shape)
    turned = chip.dims == 2 and shape[::-1] in known
    if shape in known or turned or (whole_cubes and 0 < math.prod(shape) <= chip.most_chips):
        return topology
    more = ", and multiples of 4x4x4" if chip.dims == 3 else ""
    names = ", ".join(Topology(kind, one).name for one in known)
    raise _problem(f"there is no {topology.name}", f"known: {names}{more}")


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


def devices(topology: Topology, slices: int = 1) -> list[Any]:
    """The compiler's devices of a topology, for meshes and for ahead-of-time compilation; they can run nothing.

    Several slices are as many such topologies, joined by the data centre's network; one comes after the other. Call
    this in a process with `compiler_environment` and libtpu.

    Raises:
        InputError: the compiler does not take the topology.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
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
    command = [sys.executable, "-m", "podling.topology", topology.name, json.dumps(dict(mesh))]
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
