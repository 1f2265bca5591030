"""A layout as text: 80 columns are enough, and nothing is cut short."""

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podling.files import show_binary
from podling.layout.describe import ESTIMATE_NOTE, Layout
from podling.layout.grid import Cell, Grid, legend, live_axes, plane_rows, planes, state_part
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
        for part in _grid(layout.grid, z, console.width):
            console.print(part)
    console.print(legend(layout.grid), highlight=False)
    for kind in (PARAMETERS, *MOMENTS.values(), BATCH, ACTIVATIONS):
        if any(row.kind == kind for row in layout.rows):
            console.print()
            console.print(_arrays(kind, layout, console.width))
    console.print()
    console.print(_totals(layout))
    console.print(ESTIMATE_NOTE, highlight=False)
    console.print()
    console.print(_links(layout))


def _grid(grid: Grid, z: int | None, width: int) -> list[Table]:
    """Chip coordinates x to the right and y down; devices without coordinates one after another.

    A plane that is wider than `width` is drawn in several tables, from left to right.
    """
    rows = plane_rows(grid, z, columns=8 if len(grid.cells) <= 64 else 16)
    heads = [_head(cell, index, rows[0]) for index, cell in enumerate(rows[0])]
    cell_width = max(len(str(len(grid.cells) - 1)), *map(len, heads))
    wide = len(heads) * (cell_width + 3) + 18 <= width  # borders, padding and the two columns of labels
    at_once = len(heads) if wide else max(1, (width - 14) // (cell_width + 1))
    at_once -= at_once % (1 + max(cell.core for cell in rows[0]))  # the cores of a chip stay together
    tables: list[Table] = []
    for start in range(0, len(heads), at_once):
        shown = heads[start : start + at_once]
        title = [] if z is None or len(planes(grid)) == 1 else [f"z = {z}"]
        title += [] if len(shown) == len(heads) else [f"{'x = ' if z is not None else ''}{shown[0]} to {shown[-1]}"]
        cells = [row[start : start + at_once] for row in rows]
        tables.append(_columns(grid, rows, cells, shown, ", ".join(title), 1 if wide else 0))
    return tables


def _head(cell: Cell, index: int, row: list[Cell]) -> str:
    core = f".{cell.core}" if any(other.core for other in row) else ""
    return f"{cell.coords[0]}{core}" if cell.coords else f"+{index}"


def _columns(
    grid: Grid, rows: list[list[Cell]], cells: list[list[Cell]], heads: list[str], title: str, padding: int
) -> Table:
    """Some columns of a plane: `rows` are its whole rows, for their labels, and `cells` the part of each to draw."""
    axes = live_axes(grid)
    table = Table(
        box=box.SQUARE, show_lines=len(rows) <= 8, padding=(0, padding), title=title or None, title_justify="left"
    )
    table.add_column("y \\ x" if rows[0][0].coords else "from", style="dim", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row, part in zip(rows, cells, strict=True):
        table.add_row(
            str(row[0].coords[1] if row[0].coords else row[0].device),
            "\n".join(["device", *axes]),
            *(
                Text(
                    "\n".join([str(c.device), *(str(c.place[axis]) for axis in axes)]),
                    style=COLOURS[state_part(c, grid) % len(COLOURS)],
                )
                for c in part
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
        table.add_row(
            Text("together", style="dim"),
            "",
            "",
            Text(show_binary(sum(row.device_bytes for row in rows)), style="bold"),
        )
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
    used, whole = layout.estimated_bytes, layout.device_memory_bytes
    scale = 30 / max(used, whole)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), title="each device", title_justify="left")
    table.title_style = "bold"
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    for kind, size in layout.memory_estimate_bytes.items():
        table.add_row(kind, show_binary(size), Text("█" * round(size * scale), style="cyan"))
    table.add_row("together, an estimate", show_binary(used), Text("█" * round(used * scale), style="bold"))
    table.add_row("its memory", show_binary(whole), Text("█" * round(whole * scale), "dim"))
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
