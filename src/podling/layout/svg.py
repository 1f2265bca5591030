"""A layout as a picture: the grid of devices, and what fills the memory of one of them."""

import colorsys
import math
import textwrap

from podling.files import show_binary
from podling.layout.describe import ESTIMATE_NOTE, Layout
from podling.layout.grid import Cell, Grid, directions, legend, live_axes, plane_rows, planes
from podling.svg import COLOURS, INNER, MARGIN, WIDTH, document, text

LINE = 15


def picture(layout: Layout) -> str:
    """The SVG document."""
    parts: list[str] = []
    title = f"{layout.model} on {layout.where}"
    y = MARGIN + 20
    parts.append(text(MARGIN, y, title, 18, bold=True))
    y += 22
    parts.append(text(MARGIN, y, f"mesh {layout.mesh}, {layout.params / 1e6:,.1f}M parameters", 14, soft=True))
    y += 16
    for z in planes(layout.grid):
        drawn, y = _plane(layout.grid, z, y)
        parts += drawn
    y = _sentences(parts, _sayings(layout.grid), y)
    drawn, y = _bars(layout, y + 34)
    parts += drawn
    height = round(y + MARGIN + 4)
    return document(title, parts, height)


def _sayings(grid: Grid) -> list[str]:
    """What is said below the cells: which share a colour, and where no cell has words which way the axes run."""
    drawn = [_rows(grid, z) for z in planes(grid)]
    written = _widths(grid, drawn[0])[-1]
    return [legend(grid)] if written or len(grid.cells) == 1 else [legend(grid), directions(grid, drawn)]


def _sentences(parts: list[str], sentences: list[str], y: float) -> float:
    """Add sentences below `y`, wrapped, and say where they end."""
    for line in [line for sentence in sentences for line in textwrap.wrap(sentence, 55)]:
        y += LINE + 2
        parts.append(text(MARGIN, y, line, 13, soft=True))
    return y


def _rows(grid: Grid, z: int | None) -> list[list[Cell]]:
    """A plane's cells: where devices have no place, four side by side, or of many about as many as there are rows."""
    count = len(grid.cells)
    return plane_rows(grid, z, columns=4 if count <= 32 else 1 << (count.bit_length() // 2))


def _widths(grid: Grid, rows: list[list[Cell]]) -> tuple[int, float, bool]:
    """Room for coordinates on the left, the width of a cell, and whether there is room in it for words."""
    gutter = 22 if rows[0][0].coords else 0
    width = min(INNER / 2, (INNER - gutter) / max(map(len, rows)))
    return gutter, width, width >= 56


def _plane(grid: Grid, z: int | None, y: float) -> tuple[list[str], float]:
    """One plane of devices below `y`, and where it ends."""
    rows, axes = _rows(grid, z), live_axes(grid)
    parts: list[str] = []
    if len(planes(grid)) > 1:
        y += 20
        parts.append(text(MARGIN, y, f"z = {z}", 13, soft=True))
    gutter, width, written = _widths(grid, rows)
    height = 26 + (len(axes) + (1 if gutter else 0)) * LINE if written else width
    if gutter:
        y += LINE
        parts += _x_labels(rows[0], y, width)
        parts.append(text(MARGIN, y, "y\\x", 12, soft=True))
    y += 5
    every = math.ceil(LINE / height)
    for number, row in enumerate(rows):
        if gutter and number % every == 0:
            parts.append(text(MARGIN + 6, y + height / 2 + 4, str((row[0].coords or (0, 0))[1]), 12, soft=True))
        for index, cell in enumerate(row):
            parts.append(_cell(cell, grid, MARGIN + gutter + index * width, y, width, height, axes, written))
        y += height
    return parts, y


def _x_labels(row: list[Cell], y: float, width: float) -> list[str]:
    """The chips' x above their cells, each over all its cores, and only as many as do not touch one another."""
    left = MARGIN + 22
    cores = 1 + max(cell.core for cell in row)
    xs = [str(cell.coords[0]) for cell in row if cell.coords and cell.core == 0]
    every = math.ceil(9 * max(map(len, xs)) / (width * cores))
    return [
        text(left + (index + 0.5) * width * cores, y, x, 12, soft=True, anchor="middle")
        for index, x in enumerate(xs)
        if index % every == 0
    ]


def _cell(
    cell: Cell, grid: Grid, x: float, y: float, width: float, height: float, axes: list[str], written: bool
) -> str:
    radius = 6 if written else 2
    lines = [
        f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{_colour(cell, grid)}" fill-opacity=".5"/>'
    ]
    middle = x + width / 2
    if written:
        lines.append(
            text(
                middle,
                y + 19,
                f"device {cell.device}" if width > 70 else str(cell.device),
                13,
                bold=True,
                anchor="middle",
            )
        )
        words = [f"{axis} {cell.place[axis]}" for axis in axes]
        if cell.coords:
            core = f" core {cell.core}" if any(other.core for other in grid.cells) else ""
            shown = cell.coords if len(planes(grid)) > 1 else cell.coords[:2]
            words.insert(0, f"({', '.join(map(str, shown))}){core}")
        for index, word in enumerate(words):
            lines.append(text(middle, y + 19 + (index + 1) * LINE, word, 12, anchor="middle"))
    return "".join(lines)


def _colour(cell: Cell, grid: Grid) -> str:
    """Hue by the index on fsdp, lightness by the index on tensor: one colour for each part of the state."""
    fsdp, tensor = grid.sizes["fsdp"], grid.sizes["tensor"]
    if fsdp == 1 and tensor > 1:  # then hue is for tensor
        hue, lightness = cell.place["tensor"] / tensor, 0.5
    else:
        hue = cell.place["fsdp"] / fsdp
        lightness = 0.5 if tensor == 1 else 0.32 + 0.4 * cell.place["tensor"] / (tensor - 1)
    red, green, blue = colorsys.hls_to_rgb((hue + 0.58) % 1, lightness, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _bars(layout: Layout, y: float) -> tuple[list[str], float]:
    """What fills one device's memory, each part beginning where the one before ends."""
    items, used, whole = list(layout.memory_estimate_bytes.items()), layout.estimated_bytes, layout.device_memory_bytes
    scale = INNER / max(used, whole)
    title = f"One device, estimated: {show_binary(used)} of {show_binary(whole)}"
    parts = [text(MARGIN, y, title, 15, bold=True)]
    start = 0.0
    y += 10
    for index, (kind, size) in enumerate(items):
        y += LINE + 2
        parts.append(text(MARGIN, y, kind, 13))
        parts.append(text(WIDTH - MARGIN, y, show_binary(size), 13, anchor="end"))
        y += 6
        parts.append(f'<rect class="track" x="{MARGIN}" y="{y:.1f}" width="{INNER}" height="9" rx="4"/>')
        parts.append(
            f'<rect x="{MARGIN + start * scale:.1f}" y="{y:.1f}" width="{max(size * scale, 1.5):.1f}" height="9" '
            f'rx="2" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        start += size
        y += 14
    if used > whole:
        edge = MARGIN + whole * scale
        top = y - len(items) * (LINE + 22)
        parts.append(
            f'<line class="full" x1="{edge:.1f}" x2="{edge:.1f}" y1="{top:.1f}" y2="{y:.1f}" stroke-width="2"/>'
        )
        y += LINE
        parts.append(text(MARGIN, y, "the line is where its memory ends", 13, soft=True))
    return parts, _sentences(parts, [ESTIMATE_NOTE], y + 2)
