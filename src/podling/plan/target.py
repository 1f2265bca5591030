"""What a plan is made for: chips of one kind, by the name that people give them. No JAX."""

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from podling.chips import CHIPS, Chip
from podling.errors import InputError, Problem
from podling.topology import SHAPES, SYNONYMS, Topology, parse_topology

EXAMPLES = "for example v5e-8, v5e:2x4, 2xv5e-256, h100, 8xh100, cpu"

APPROXIMATE = {
    # Left to itself, libtpu 0.0.42 gives v4:2x2x1 eight devices; asked for megacore it gives four of 30.75 GiB and
    # counts a matrix product at 7 of a chip's 8 arrays, those of both cores.
    "v4": "podling asks the compiler for the two cores of a v4 chip as one device, as real ones show them, but no "
    "program so compiled has been set against a real one: rely on whether it fits, not on the time"
}


@dataclass(frozen=True)
class Target:
    """Devices of one kind and how they are joined."""

    text: str
    """As it was asked for."""
    chip: Chip
    devices: int
    """In all, as JAX counts them."""
    topology: Topology | None
    """Of one slice; None where there is no grid of chips."""
    slices: int = 1
    """Groups whose devices are joined by links; the groups are joined by the data centre's network."""
    approximate: str = ""
    """In words, what a plan for this target cannot know; empty where nothing is to be said."""

    @property
    def platform(self) -> Literal["tpu", "gpu", "cpu"]:
        return self.chip.platform

    @property
    def joined(self) -> int:
        """Devices of one slice."""
        return self.devices // self.slices

    @property
    def device_bytes(self) -> int:
        """Memory of one device that a program can use; a CPU's devices share half of this machine's memory."""
        if self.platform == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * self.devices)
        return self.chip.hbm_bytes

    @property
    def name(self) -> str:
        """The same for all ways of naming the same target: `v5e:2x4`, `2xv5e:16x16`, `8xh100`, `cpu`."""
        one, count = (self.topology.name, self.slices) if self.topology else (self.chip.name, self.devices)
        return one if count == 1 else f"{count}x{one}"


def parse_target(text: str) -> Target:
    """Read `v5e-8`, `v5e:2x4`, `2xv5e-256` (slices), `h100`, `8xh100` or `cpu`.

    Raises:
        InputError: there is no such chip (the nearest is named), no such topology (those that exist are named), or not
            that many of them work together.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([a-z].*)", text.strip().lower())
    count = int(match[1] or 1) if match else 0
    if not match or not count:
        raise _problem(f"{text!r} is no number of chips", EXAMPLES)
    kind = SYNONYMS.get(_kind(match[2]), _kind(match[2]))
    if kind in SHAPES:
        return _tpus(text, match[2], kind, count)
    if match[2] not in CHIPS:
        raise _problem(f"there is no chip {match[2]!r}", _nearest(match[2]))
    chip = CHIPS[match[2]]
    joined = min(count, chip.most_chips) if chip.platform == "gpu" else count
    if count % joined or (count > joined and not chip.between_slices_bytes_per_s):
        many = f", so more come in multiples of {joined}" if chip.between_slices_bytes_per_s else ""
        raise _problem(
            f"{text.strip()}: a machine has at most {joined} {chip.name}{many}", f"for example {joined}x{kind}"
        )
    return Target(text.strip(), chip, count, None, count // joined)


def _tpus(text: str, one: str, kind: str, slices: int) -> Target:
    if one == kind:  # a kind alone leaves open how many
        raise _problem(f"{text.strip()!r} does not say how many chips", f"known: {', '.join(_sizes(kind))}")
    try:
        topology = parse_topology(one)
    except InputError as error:
        problem = error.problems[0]
        raise InputError(Problem("--chip", problem.what, problem.fix)) from error
    if slices > 1 and not topology.chip.between_slices_bytes_per_s:
        raise _problem(f"slices of {kind} cannot work together", f"one slice of up to {_sizes(kind)[-1]}")
    return Target(text.strip(), topology.chip, topology.devices * slices, topology, slices, APPROXIMATE.get(kind, ""))


def _kind(name: str) -> str:
    return re.split("[-:]", name, maxsplit=1)[0]


def _sizes(kind: str) -> list[str]:
    """Every `v5e-8` of a kind."""
    return [f"{kind}-{Topology(kind, shape).cores}" for shape in SHAPES[kind]]


def _nearest(name: str) -> str:
    others = [name for name in CHIPS if name not in SHAPES]
    near = get_close_matches(name, [*(size for kind in SHAPES for size in _sizes(kind)), *others], cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(SHAPES)} with a number (v5e-8), {', '.join(others)}"


def _problem(what: str, fix: str) -> InputError:
    return InputError(Problem("--chip", what, fix))
