"""Every collective of a compiled program: what travels, over which mesh axes, how often, and whether compute goes on.

Spellings that are seen through: `-start`/`-done` pairs and the TPU compiler's chains of `async_collective_fusion`
(one collective in several fusions, compute between them) are one asynchronous collective; an all-reduce fused with the
slice that keeps a device's own piece is the reduce-scatter it is executed as. The CPU compiler leaves that pair
unfused: such an all-reduce keeps its kind, and says in `cut` what is kept of each result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from podling.hlo.groups import crossed_axes, read_groups
from podling.hlo.program import SAME_VALUE, Program
from podling.hlo.text import Instruction, Shape

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")


@dataclass(frozen=True)
class Collective:
    """One collective, which may carry several arrays; shapes and bytes are one device's."""

    kind: str
    axes: tuple[str, ...]  # mesh axes it crosses
    group: int  # devices that take part together
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    cut: tuple[Shape | None, ...]  # of an all-reduce's result, the piece that alone is used; else None
    times: int  # per run of the program
    asynchronous: bool
    op_name: str  # where in the traced program it comes from
    name: str
    computation: str
    scheduled_in: str  # the computation that runs step by step,
    runs_in: tuple[str, ...]  # and the instructions there, in order: the first starts it, the last waits for it

    @property
    def operand_bytes(self) -> int:
        """Bytes a device puts in, each time."""
        return sum(shape.bytes for shape in self.operands)

    @property
    def result_bytes(self) -> int:
        """Bytes a device gets out, each time."""
        return sum(shape.bytes for shape in self.results)

    @property
    def sent_bytes(self) -> int:
        """Bytes a device sends each time, by the ring algorithms (Chan et al. 2007, table 2)."""
        n = self.group
        whole = self.result_bytes if self.kind == "all-gather" else self.operand_bytes
        if self.kind == "collective-permute":
            return whole
        return (2 if self.kind == "all-reduce" else 1) * whole * (n - 1) // n


def find_collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of the program.

    Args:
        program: compiled under a mesh.
        mesh: the mesh's axes and sizes, in order (`mesh.shape`); the groups are read in its device order.
    """
    found: dict[tuple[str, ...], Collective] = {}
    chains: dict[tuple[str, ...], list[str]] = {}
    for computation, instruction in program.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        scheduled, runs_in = program.scheduled_as(computation, instruction.name)
        chained = "async_collective_fusion_config" in instruction.config and scheduled != computation
        channel = instruction.attribute("channel_id")
        # The links of a chain share their channel and the computation around them.
        key = (scheduled, kind, channel) if chained else (computation, instruction.name)
        chains.setdefault(key, []).append(runs_in)
        if key not in found:
            found[key] = _collective(program, mesh, computation, instruction, kind, chained)
    return [replace(one, runs_in=_ordered(program, one, chains[key])) for key, one in found.items()]


def _ordered(program: Program, one: Collective, runs_in: list[str]) -> tuple[str, ...]:
    """The instructions of the schedule that it runs in, that which waits for its start among them."""
    schedule = list(program.computations[one.scheduled_in])
    waits = [
        user.name
        for name in runs_in
        for user in program.users[one.scheduled_in].get(name, [])
        if user.opcode.endswith(("-done", "-update"))
    ]
    return tuple(sorted({*runs_in, *waits}, key=schedule.index))


def _collective(
    program: Program,
    mesh: Mapping[str, int],
    computation: str,
    instruction: Instruction,
    kind: str,
    chained: bool,
) -> Collective:
    here = program.computations[computation]
    wrappers = [call.instruction for call in program.callers[computation]]
    started = instruction.opcode.endswith("-start") or any(call.opcode == "async-start" for call in wrappers)
    results = instruction.shapes
    if instruction.opcode.endswith("-start"):  # the result of a start is bookkeeping; that of its done is the value
        done = [user for user in program.users[computation].get(instruction.name, []) if user.opcode.endswith("-done")]
        results = done[0].shapes if done else results
    groups = read_groups(instruction.attributes, program.partitions)
    group = max(map(len, groups))
    cut: tuple[Shape | None, ...] = (None,) * len(results)
    op_name = instruction.op_name
    if kind == "all-reduce":
        cut = tuple(_cut(program, computation, instruction, index) for index in range(len(results)))
        if all(cut) and any(call.opcode == "fusion" for call in wrappers):
            kind, results, cut = "reduce-scatter", tuple(piece for piece in cut if piece), (None,) * len(cut)
            op_name = op_name or wrappers[0].op_name
    return Collective(
        kind=kind,
        axes=crossed_axes(groups, mesh),
        group=group,
        operands=tuple(shape for name in instruction.operands for shape in here[name].shapes),
        results=results,
        cut=cut,
        times=program.times[computation],
        asynchronous=started or chained,
        op_name=op_name,
        name=instruction.name,
        computation=computation,
        scheduled_in=program.scheduled_in(computation),
        runs_in=(),
    )


def _cut(program: Program, computation: str, reduced: Instruction, index: int) -> Shape | None:
    """The piece of result `index` that is all anyone uses of it, if there is one."""
    whole = reduced.shapes[index]
    if len(reduced.shapes) == 1:
        pieces = _uses(program, computation, reduced.name)
    else:
        users = program.users[computation].get(reduced.name, [])
        elements = [user for user in users if user.attribute("index") == str(index)]
        if len(elements) != sum(user.opcode == "get-tuple-element" for user in elements):
            return None
        pieces = set().union(*(_uses(program, computation, element.name) for element in elements))
    shares = {piece for piece in pieces if piece is not None}
    if None in pieces or len(shares) != 1:
        return None
    (share,) = shares
    return share if share.size < whole.size else None


def _uses(program: Program, computation: str, name: str) -> set[Shape | None]:
    """The shapes of the slices that are taken of a value; None among them if it is also used whole."""
    found: set[Shape | None] = set()
    here = program.computations[computation]
    if here[name].root:
        found.add(None)
    for user in program.users[computation].get(name, []):
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            found.add(user.shapes[0])
        elif user.opcode in SAME_VALUE:
            found |= _uses(program, computation, user.name)
        elif user.opcode in ("fusion", "call"):
            called = user.calls[0][1]
            for number in (number for number, operand in enumerate(user.operands) if operand == name):
                inside = program.computations[called].values()
                parameter = next(i for i in inside if i.opcode == "parameter" and i.literal == str(number))
                found |= _uses(program, called, parameter.name)
        else:
            found.add(None)
    return found


@dataclass(frozen=True)
class Total:
    """All collectives of one kind over the same axes; per step and device."""

    kind: str
    axes: tuple[str, ...]
    times: int
    arrays: int  # carried, counted each time
    operand_bytes: int
    result_bytes: int
    sent_bytes: int
    asynchronous: int  # of `times`


def totals(collectives: Iterable[Collective]) -> list[Total]:
    """The sums by kind and axes, most bytes sent first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axes), []).append(one)
    rows = [
        Total(
            kind,
            axes,
            times=sum(one.times for one in group),
            arrays=sum(one.times * len(one.operands) for one in group),
            operand_bytes=sum(one.times * one.operand_bytes for one in group),
            result_bytes=sum(one.times * one.result_bytes for one in group),
            sent_bytes=sum(one.times * one.sent_bytes for one in group),
            asynchronous=sum(one.times for one in group if one.asynchronous),
        )
        for (kind, axes), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.sent_bytes)
