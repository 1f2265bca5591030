"""A layout as text: 80 columns are enough, and nothing is cut short."""

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podling.files import show_binary
from podling.layout.describe import Layout, memory
from podling.layout.grid import Grid, legend, live_axes, plane_rows, planes, state_part
from podling.layout.table import ACTIVATIONS, BATCH, MOMENTS, PARAMETERS, Row

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
TITLES = {
    PARAMETERS: "parameters",
    BATCH: "the batch of one step",
    ACTIVATIONS: "activations of one micro-batch (in one layer; logits once)",
}
HEADS = ("shape", "on each device", "bytes there")
AS_PARAMETERS = "axes as the parameters'"


def show(layout: Layout, console: Console) -> None:
    """Print a layout."""
    count = len(layout.grid.cells)
    console.print(Text(layout.title, style="bold"))
    for line in (
        f"mesh: {layout.mesh}{'; ' + layout.why if layout.why else ''}",
        f"batch: {layout.batch}; {layout.dtype}",
        f"{count} device{'s' if count > 1 else ''}: {layout.grid.note}",
    ):
        console.print(line, highlight=False, markup=False)
    for z in planes(layout.grid):
        console.print(_grid(layout.grid, z, console.width))
    console.print(legend(layout.grid), highlight=False)
    for kind in layout.totals:
        if kind in (PARAMETERS, *MOMENTS.values(), BATCH, ACTIVATIONS):
            console.print()
            console.print(_arrays(kind, layout, console.width))
    console.print()
    console.print(_totals(layout))
    console.print()
    console.print(_links(layout))


def _grid(grid: Grid, z: int | None, width: int) -> Table:
    """Chip coordinates x to the right and y down; devices without coordinates one after another."""
    rows, axes = plane_rows(grid, z), live_axes(grid)
    columns, cell_width = max(map(len, rows)), len(str(len(grid.cells)))
    wide = columns * (cell_width + 3) + 16 <= width
    title = None if z in (None, 0) and len(planes(grid)) == 1 else f"z = {z}"
    table = Table(
        box=box.SQUARE, show_lines=len(rows) <= 8, padding=(0, 1 if wide else 0), title=title, title_justify="left"
    )
    coords = grid.cells[0].coords is not None
    table.add_column("y \\ x" if coords else "from", style="dim", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for index in range(columns):
        cell = rows[0][index]
        core = f".{cell.core}" if any(c.core for c in rows[0]) else ""
        table.add_column(f"{cell.coords[0]}{core}" if cell.coords else f"+{index}", justify="right", no_wrap=True)
    for row in rows:
        first = row[0]
        table.add_row(
            str(first.coords[1] if first.coords else first.device),
            "\n".join(["device", *axes]),
            *(
                Text(
                    "\n".join([str(c.device), *(str(c.place[axis]) for axis in axes)]),
                    style=COLOURS[state_part(c, grid) % len(COLOURS)],
                )
                for c in row
            ),
        )
    return table


def _arrays(kind: str, layout: Layout, width: int) -> Table:
    rows = [row for row in layout.rows if row.kind == kind]
    parameters = {row.name: row for row in layout.rows if row.kind == PARAMETERS}
    dtypes = {row.dtype for row in rows}
    same = kind != PARAMETERS and all(row.name in parameters and row.axes == parameters[row.name].axes for row in rows)
    title = TITLES.get(kind, kind)
    if len(dtypes) == 1:
        title += f", {rows[0].dtype}"
    if same:
        title += f"; {AS_PARAMETERS}"
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold")
    table.add_column("array, axes" if not same else "", overflow="fold")
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    numbers = [
        (_times(row.shape), _times(row.shard) if row.shard != row.shape else "all of it", show_binary(row.device_bytes))
        for row in rows
    ]
    left = width - sum(
        max(len(name), *map(len, column)) + 1 for name, column in zip(HEADS, zip(*numbers, strict=True), strict=True)
    )
    for row, cells in zip(rows, numbers, strict=True):
        name = Text(row.name if len(dtypes) == 1 else f"{row.name} ({row.dtype})")
        for line in [] if same else textwrap.wrap(axes_text(row, layout.sizes), max(20, left - 4)):
            name.append(f"\n  {line}", style="dim")
        table.add_row(name, *cells)
    if kind != ACTIVATIONS:  # those are not all there at once, nor once
        table.add_row(Text("together", style="dim"), "", "", Text(show_binary(layout.totals[kind]), style="bold"))
    return table


def axes_text(row: Row, sizes: dict[str, int]) -> str:
    """`layers qkv embed/fsdp heads`: logical axes, with the mesh axes that split them."""
    words = []
    for axis, over in zip(row.axes, row.mesh_axes, strict=True):
        live = [name for name in over if sizes[name] > 1]
        words.append(f"{axis}/{'+'.join(live)}" if live else axis)
    return " ".join(words)


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _totals(layout: Layout) -> Table:
    parts = memory(layout)
    used = sum(size for _, size in parts)
    scale = 30 / max(used, layout.device_bytes)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), title="each device", title_justify="left")
    table.title_style = "bold"
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    for kind, size in parts:
        table.add_row(kind, show_binary(size), Text("█" * round(size * scale), style="cyan"))
    table.add_row("together", show_binary(used), Text("█" * round(used * scale), style="bold"))
    table.add_row("its memory", show_binary(layout.device_bytes), Text("█" * round(layout.device_bytes * scale), "dim"))
    return table


def _links(layout: Layout) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), title="what crosses the links", title_style="bold")
    table.title_justify = "left"
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for axis, sentence in layout.traffic.items():
        table.add_row(f"{axis}={layout.sizes[axis]}", sentence)
    if not layout.traffic:
        table.add_row("", "nothing: there is one device")
    return table
