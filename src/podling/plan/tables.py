"""The tables of a plan: sizes, layouts, memory, time. 80 columns are enough, and nothing is cut short."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from podling.cost.records import CATEGORIES, KINDS, Kind, OpTime
from podling.files import show_binary
from podling.plan.records import Option, Plan
from podling.train.progress.words import count

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_black")
KIND_WORDS: dict[Kind, str] = {
    "matmul": "matrix products",
    "compute": "other compute",
    "memory": "bound by device memory",
    "collective": "waiting for collectives",
}
CATEGORY_WORDS = {
    "activations": "activations kept for the backward pass",
    "logits": "logits and loss",
    "program": "the program itself",
}
BAR = 24
MOST_TENSORS, MOST_OPS, MOST_ROWS = 6, 5, 8


def seconds(value: float) -> str:
    """'0.254 s', '38 ms', '12.3 s'."""
    if value < 0.1:
        return f"{_figures(value * 1e3)} ms"
    return f"{_figures(value)} s" if value < 99.95 else f"{value:,.0f} s"


def _figures(value: float) -> str:
    """Three of them: 0.200, 1.06, 12.3; a part that takes no time is 0."""
    return f"{value:#.3g}".rstrip(".") if value else "0"


def sizes_table(plan: Plan) -> Table | None:
    """The sizes that were compared, lowest loss by the law first."""
    if not plan.sizes:
        return None
    table = _table("sizes, lowest loss by the law first")
    for name in ("model", "parameters", "tokens", "tokens/s", "by law", "loss", ""):
        table.add_column(name, justify="left" if name in ("model", "") else "right", no_wrap=True)
    for size in plan.sizes[:MOST_ROWS]:
        if not size.fits:
            table.add_row(size.name, count(size.params), "-", "-", "-", "-", "does not fit", style="dim")
            continue
        loss = "{:.2f} to {:.2f}".format(*size.loss_range) if size.loss_range else "-"
        law = f"{size.law_loss:.3f}" if size.law_loss is not None else "-"
        chosen = size is plan.sizes[0]
        # Where nothing is compiled the plan says so once, for all of them.
        guessed = not size.compiled and plan.chosen.hbm.source == "compiler"
        mark = "chosen" if chosen else "est." if guessed else ""
        sums = (count(size.params), count(size.tokens), count(size.tokens_per_s))
        table.add_row(size.name, *sums, law, loss, mark, style="bold" if chosen else "")
    return table


def options_table(plan: Plan) -> Table:
    """The chosen layout and the runners-up, one a line."""
    table = _table("layouts that fit, best first" if plan.chosen.fits else "layouts")
    for name in ("mesh", "rows", "remat", "chunk", "memory", "step", ""):
        table.add_column(name, justify="left" if name in ("mesh", "remat") else "right", no_wrap=True)
    for option in (plan.chosen, *plan.runners_up[:MOST_ROWS]):
        table.add_row(*_row(option, plan.chosen), style="bold" if option is plan.chosen else "")
    return table


def _row(option: Option, best: Option) -> list[str]:
    layout, time = option.layout, option.time
    cut = f"{layout.accumulation} x {layout.micro_batch}" if layout.accumulation > 1 else str(layout.micro_batch)
    slower = "chosen"
    if option is not best:
        slower = f"{time.step_s / best.time.step_s - 1:+.0%}" if time and best.time else ""
        slower += "" if option.hbm.source == best.hbm.source else " est."
    return [
        layout.mesh,
        cut,
        layout.remat,
        str(layout.loss_chunk or "-"),
        show_binary(option.hbm.total_bytes),
        seconds(time.step_s) if time else "-",
        slower,
    ]


def memory_table(option: Option) -> Table:
    """What one device holds when it holds most, by category."""
    hbm = option.hbm
    rows = [(CATEGORY_WORDS.get(name, name), hbm.by_category.get(name, 0)) for name in CATEGORIES]
    rows = [row for row in rows if row[1]]
    used, limit = hbm.total_bytes, hbm.limit_bytes
    little = used < limit / BAR  # beside all of the memory one would not see it
    longest = used if little else max(used, limit)
    table = _bars("memory of one device, when most is held", rows, used, show_binary, longest)
    table.add_row(Text("together", style="bold"), show_binary(used), "█" * round(used / longest * BAR) if used else "")
    table.add_row("its memory", show_binary(limit), Text("" if little else "█" * round(limit / longest * BAR), "dim"))
    return table


def tensors_table(option: Option) -> Table | None:
    """The largest arrays by name; None where they are not known."""
    if not option.hbm.largest:
        return None
    table = _table("the largest arrays in it")
    table.add_column("array", overflow="fold")
    table.add_column("kind", no_wrap=True)
    table.add_column("one device's", justify="right", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for tensor in option.hbm.largest[:MOST_TENSORS]:
        table.add_row(tensor.name, tensor.category, Text(tensor.shape), show_binary(tensor.device_bytes))
    return table


def time_table(option: Option) -> Table | None:
    """The parts of a step; None where the step does not exist."""
    if option.time is None:
        return None
    rows = [(KIND_WORDS[kind], option.time.parts_s.get(kind, 0.0)) for kind in KINDS]
    return _bars("where the time of a step goes", rows, option.time.step_s, seconds)


def ops_table(option: Option) -> Table | None:
    """The instructions that take longest; None for an estimate."""
    if option.time is None or not option.time.ops:
        return None
    table = _table("what takes longest")
    table.add_column("line of the traced program", overflow="fold")
    table.add_column("bound by", no_wrap=True)
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("a step", justify="right", no_wrap=True)
    for name, op in _by_line(option.time.ops)[:MOST_OPS]:
        table.add_row(Text(name), op.kind, str(op.times), seconds(op.step_s))
    return table


def _by_line(ops: Iterable[OpTime]) -> list[tuple[str, OpTime]]:
    """The instructions of one line together, most time first; bound by what the longest of them is."""
    lines: dict[str, OpTime] = {}
    for op in ops:
        name = _short(op.op_name) or op.name
        first = lines.get(name)
        lines[name] = replace(first, times=first.times + op.times, step_s=first.step_s + op.step_s) if first else op
    return sorted(lines.items(), key=lambda line: -line[1].step_s)


def _short(op_name: str) -> str:
    """Without what every name has: `jvp()/while/body/closed_call/mlp/dot_general` → `jvp()/mlp/dot_general`."""
    dull = {"while", "body", "closed_call", "checkpoint", "shard_map"}
    return "/".join(p for p in op_name.split("/") if p not in dull and not p.startswith("jit("))


def _bars(
    heading: str,
    rows: Iterable[tuple[str, float]],
    whole: float,
    shown: Callable[[float], str],
    longest: float | None = None,
) -> Table:
    """Each part with its share of the whole; a bar of full length is `longest`, or the whole."""
    table = _table(heading, headers=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for index, (name, size) in enumerate(rows):
        length = round(size / (longest or whole) * BAR) if whole else 0
        bar = Text("█" * length, style=COLOURS[index % len(COLOURS)])
        table.add_row(name, shown(size), bar.append(f" {size / whole:.0%}", style="dim") if whole else bar)
    return table


def _table(heading: str, *, headers: bool = True) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=heading, title_justify="left", show_header=headers)
    table.title_style, table.header_style = "bold", "dim"
    return table
