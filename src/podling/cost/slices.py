"""What a program of one TPU slice exchanges with the other slices, over the data centre's network.

The TPU compiler makes one slice's program. What crosses to the others is a `send` and a `recv-done` on the host, which
name their exchange and its kind; the collectives beside them stay within the slice.
"""

import re
from dataclasses import dataclass

from podling.chips import Chip
from podling.hlo.program import Program
from podling.hlo.text import Instruction

_EXCHANGE = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
BETWEEN = ("between slices",)
"""The lane that exchanges take."""


@dataclass(frozen=True)
class Exchange:
    """One exchange of a device with its like in the other slices."""

    name: str  # the compiler's own
    kind: str  # ALL_REDUCE, ALL_GATHER ...
    bytes: int  # of the array that a device sends, or of that which it receives if that is larger

    def seconds(self, chip: Chip, slices: int) -> float:
        """By its bytes alone: the ring algorithms (Chan et al. 2007), in each direction a device's share of the way."""
        ways = 2 if self.kind == "ALL_REDUCE" else 1
        return ways * self.bytes * (slices - 1) / slices / chip.between_slices_bytes_per_s


def exchange_of(program: Program, computation: str, instruction: Instruction) -> Exchange | None:
    """The exchange that a `send` begins, or that a `recv-done` waits for; None for all else."""
    here = program.computations[computation]
    if instruction.opcode == "recv-done":
        instruction = here[instruction.operands[0]]
    elif instruction.opcode != "send":
        return None
    name, kind = _EXCHANGE.search(instruction.attributes), _KIND.search(instruction.attributes)
    if not name or not kind:
        return None
    both = [one for one in here.values() if one.opcode in ("send", "recv") and f'"{name[1]}"' in one.attributes]
    return Exchange(name[1], kind[1], max(one.shapes[0].bytes for one in both))
