"""Optimised HLO text (`compiled.as_text()`, CPU or TPU) as computations of instructions.

The form is that of XLA's own printer: a computation is a header `%name (...) -> ... {`, then one instruction a line,
`%name = shape opcode(operands), attributes, metadata={...}, backend_config={...}`.
"""

import math
import re
from dataclasses import dataclass, field

from podling.errors import Problem, RunError

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations"
    r"|select|scatter)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_KERNEL_METADATA = re.compile(r"(kernel_metadata=\{)\n(.*)\n(\})")  # of Pallas kernels, over three lines
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """An array's dtype, by XLA's name, and dimensions."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = field(default="", compare=False)
    """As XLA prints it, `1,0:T(8,128)(2,1)S(1)`: axes from fastest to slowest, tiles, memory space."""

    @property
    def space(self) -> int:
        """Where it lies. 0: the device's main memory. On a TPU 1 is VMEM, 2 holds semaphores, 6 scalars."""
        found = _SPACE.search(self.layout)
        return int(found[1]) if found else 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding; 0 for what is no array (tokens)."""
        return -(-self.size * self._bits // 8)

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in memory: the fastest axes filled up to whole tiles, where its layout has tiles."""
        tile, order = _TILE.search(self.layout), self.layout.partition(":")[0]
        if not tile or not self.dims or not order:
            return self.bytes
        sizes = [self.dims[int(axis)] for axis in order.split(",")]  # fastest first
        tiles = [int(size) for size in tile[1].split(",")][::-1]
        padded = [-(-size // part) * part for size, part in zip(sizes, tiles, strict=False)]
        return -(-math.prod(padded) * math.prod(sizes[len(padded) :]) * self._bits // 8)

    @property
    def _bits(self) -> int:
        return 8 if self.dtype == "pred" else int((re.match(r"[a-z]+(\d+)", self.dtype) or [0, 0])[1])

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result; a tuple's leaves in order
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses: a constant's value, a parameter's number
    attributes: str  # the rest, up to metadata and backend_config
    calls: tuple[tuple[str, str], ...]  # (attribute, computation): ("body", "region_1")
    op_name: str  # which line of the traced program it comes from
    config: str  # backend_config as JSON text
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def estimated_cycles(self) -> int | None:
        """The TPU compiler's own estimate, where it made one."""
        found = _CYCLES.search(self.config)
        return int(found[1]) if found else None

    def attribute(self, name: str) -> str:
        """The value of a plain attribute (`index=3`, `direction=LT`), or nothing."""
        found = re.search(rf"\b{name}=([\w.\-]+)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]
"""Instructions by name, in order: a schedule, where the compiler made one."""


def root(computation: Computation) -> Instruction:
    """The instruction whose value the computation returns."""
    return next(instruction for instruction in computation.values() if instruction.root)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the entry.

    Raises:
        RunError: text that is not optimised HLO; the line is named.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for number, line in enumerate(_KERNEL_METADATA.sub(r"\1\2\3", text).splitlines(), 1):
        header = None if line.startswith(" ") else _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            try:
                instruction = _instruction(line)
            except (ValueError, IndexError, TypeError) as error:
                where = f"compiled program, line {number}"
                raise RunError(Problem(where, f"this is no HLO instruction: {line.strip()[:80]}")) from error
            current[instruction.name] = instruction
    if not entry:
        raise RunError(Problem("compiled program", "there is no ENTRY computation in it", "give it compiled.as_text()"))
    return computations, entry


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Every array shape in the text, in order: `(f32[2,3]{1,0}, s32[])` gives two."""
    return tuple(
        Shape(dtype, tuple(int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip()), layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    if not start:
        raise ValueError(line)
    shape_end = _closing(line, start.end()) if line[start.end()] == "(" else line.index(" ", start.end())
    opcode = _OPCODE.match(line, shape_end)
    if not opcode:
        raise ValueError(line)
    close = _closing(line, opcode.end() - 1)
    literal, rest = line[opcode.end() : close - 1], line[close:]
    attributes = re.split(r", (?:metadata|backend_config)=", rest, maxsplit=1)[0]
    op_name = _OP_NAME.search(rest)
    return Instruction(
        name=start[2],
        opcode=opcode[1],
        shapes=read_shapes(line[start.end() : shape_end]),
        operands=() if opcode[1] in ("constant", "parameter") else tuple(_NAME.findall(literal)),
        literal=literal,
        attributes=attributes,
        calls=tuple(
            (kind, name) for kind, names in _CALLS.findall(attributes) for name in re.findall(r"[\w.\-]+", names)
        ),
        op_name=op_name[1] if op_name else "",
        config=rest.partition("backend_config=")[2],
        root=bool(start[1]),
    )


def _closing(line: str, opening: int) -> int:
    """Where the parenthesis that opens at `opening` has closed."""
    depth = 0
    for mark in re.finditer(r"[()]", line[opening:]):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return opening + mark.end()
    raise ValueError(line)
