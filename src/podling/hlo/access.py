"""What a scheduled instruction reads and writes of device memory.

A fusion reads of an operand what its inside takes: one layer of a stack where it slices, rows where it gathers. A
dynamic-update-slice writes its update in place. Arrays in a TPU's VMEM or scalar memory are no traffic.
"""

from podling.hlo.program import Program
from podling.hlo.text import Computation, Instruction, Shape, root

NOTHING_MOVES = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "partition-id",
    "replica-id", "while", "conditional", "call",
)  # fmt: skip
"""Opcodes that move nothing themselves; what the last ones run is counted inside."""
FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape")
"""Custom calls of the TPU compiler that name memory and move nothing."""
TAKES_PART = ("dynamic-slice", "slice", "gather")
SEEN_THROUGH = ("bitcast", "reshape", "get-tuple-element", "tuple", "opt-barrier")


def hbm_bytes(program: Program, computation: str, instruction: Instruction) -> int:
    """Bytes of device memory read and written, each time; those of an asynchronous copy are all with its start."""
    opcode = instruction.opcode
    if opcode in NOTHING_MOVES or opcode.endswith(("-done", "-update")) or is_free(instruction):
        return 0
    here = program.computations[computation]
    if opcode in ("copy-start", "slice-start"):
        return _moved(here, instruction)
    if opcode == "async-start":
        called = instruction.calls[0][1]
        return hbm_bytes(program, called, root(program.computations[called]))
    read = sum(
        _read(program, instruction, place, here[name].shapes)
        for place, name in enumerate(instruction.operands)
        if name not in instruction.operands[:place]
    )
    return read + _written(program, here, instruction)


def is_free(instruction: Instruction) -> bool:
    """Whether it is a custom call that only names memory."""
    return instruction.opcode == "custom-call" and any(
        f'custom_call_target="{target}"' in instruction.attributes for target in FREE_TARGETS
    )


def _in_hbm(shape: Shape) -> int:
    return shape.bytes if shape.space == 0 else 0


def _moved(here: Computation, start: Instruction) -> int:
    """A copy-start's result is (destination, source, context), a slice-start's ((source), destination, context)."""
    whole = [shape for name in start.operands for shape in here[name].shapes]
    arrays = start.shapes[:2] if start.opcode == "copy-start" else (start.shapes[-2], whole[0])
    size = min(shape.bytes for shape in arrays)
    return size * sum(shape.space == 0 for shape in arrays)


def _read(program: Program, instruction: Instruction, place: int, shapes: tuple[Shape, ...]) -> int:
    whole = sum(map(_in_hbm, shapes))
    if instruction.opcode == "fusion":
        inside = program.computations[instruction.calls[0][1]]
        parameter = next((i for i in inside.values() if i.opcode == "parameter" and i.literal == str(place)), None)
        if parameter is None:
            return 0
        return min(whole, _taken(program, instruction.calls[0][1], parameter)) if whole else 0
    return min(whole, _taken_by(instruction, place, whole))


def _taken_by(user: Instruction, place: int, whole: int) -> int:
    """Bytes that one plain instruction takes of its operand at `place`."""
    if user.opcode in TAKES_PART and place == 0:
        return user.bytes
    if user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
        return 0  # what is not updated stays where it is
    return whole


def _taken(program: Program, computation: str, value: Instruction) -> int:
    """Bytes of a value that the inside of a fusion takes, by all its users together."""
    whole, total = value.bytes, 0
    for user in program.users[computation].get(value.name, []):
        for place in (place for place, name in enumerate(user.operands) if name == value.name):
            if user.opcode == "fusion":
                called = user.calls[0][1]
                inside = program.computations[called].values()
                inner = next((i for i in inside if i.opcode == "parameter" and i.literal == str(place)), None)
                total += _taken(program, called, inner) if inner else 0
            elif user.opcode in SEEN_THROUGH:
                total += _taken(program, computation, user)
            else:
                total += _taken_by(user, place, whole)
    return min(whole, total)


def _written(program: Program, here: Computation, instruction: Instruction) -> int:
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return _updated(here, instruction)
    if instruction.opcode != "fusion":
        return sum(map(_in_hbm, instruction.shapes))
    called = instruction.calls[0][1]
    written = _results(program, called)
    if len(written) != len(instruction.shapes):
        return sum(map(_in_hbm, instruction.shapes))
    pairs = zip(instruction.shapes, written, strict=True)
    return sum(min(shape.bytes, part) for shape, part in pairs if shape.space == 0)


def _results(program: Program, computation: str) -> list[int]:
    """Of each result of a fusion, the bytes that are written: all, or the update where the rest stays in place."""
    inside = program.computations[computation]
    last = root(inside)
    results = [inside[name] for name in last.operands] if last.opcode == "tuple" else [last]
    written: list[int] = []
    for result in results:
        while result.opcode in ("bitcast", "reshape") and result.operands:
            result = inside[result.operands[0]]
        if result.opcode in ("dynamic-update-slice", "scatter"):
            written.append(_updated(inside, result))
        elif result.opcode == "fusion":
            written += _results(program, result.calls[0][1])
        else:
            written += [shape.bytes for shape in result.shapes]
    return written


def _updated(here: Computation, update: Instruction) -> int:
    """Bytes of what is written into the array; a scatter reads it first, to add to it."""
    if update.shapes[0].space:
        return 0
    changed = here[update.operands[1 if update.opcode == "dynamic-update-slice" else -1]].bytes
    return changed * (2 if update.opcode == "scatter" else 1)
