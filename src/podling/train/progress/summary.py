"""The last thing a run says: what it reached, beside what it had to beat, and what to type next."""

import shlex
from typing import Any

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from podling.train.progress.words import count, duration, held_against, loss, share


def summary_view(summary: dict[str, Any], width: int) -> Group:
    """A table `width` columns wide, and commands; without colours it is plain text."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(summary):
        facts.add_row(name, Text(value))
    inside = Group(facts, Text(), _losses(summary))
    title = Text(f"finished: {summary['run']}")
    panel = Panel(inside, title=title, title_align="left", box=box.ROUNDED, width=width)
    return Group(panel, Text("next:", style="bold"), *(Text(f"  {line}", overflow="fold") for line in _next(summary)))


def _losses(summary: dict[str, Any]) -> Table:
    """The model beside the models that only count, on the same held-out tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("on held-out text")
    table.add_column("nats/token", justify="right")
    parses = any(summary.get(key) is not None for key in ("parse_share", "bigram_parse_share"))
    if parses:
        table.add_column("samples that parse", justify="right")
    rows = [
        ("unigram model", summary.get("unigram_loss"), None, ""),
        ("bigram model", summary.get("bigram_loss"), summary.get("bigram_parse_share"), ""),
        (
            "this model",
            summary.get("val_loss"),
            summary.get("parse_share"),
            "bold green" if _beats(summary) else "bold",
        ),
    ]
    for name, value, parsed, style in rows:
        table.add_row(name, loss(value), *([_whole(parsed)] if parses else []), style=style)
    return table


def _beats(summary: dict[str, Any]) -> bool:
    """Green is for a model that has learned more than counting does."""
    val, bigram = summary.get("val_loss"), summary.get("bigram_loss")
    return val is not None and bigram is not None and val < bigram


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    waited = f"{share(summary.get('data_wait_share'))} of the time waiting for data"
    peak = f" of the peak ({summary['mfu_peak']})" if summary.get("mfu_peak") and summary.get("mfu") is not None else ""
    retraces = summary.get("retraces")
    took = f"{duration(summary.get('wall_s'))} ({duration(summary.get('train_s'))} of it in optimizer steps)"
    steps = f"{summary['steps']:,} steps, {count(summary['tokens'])} tokens in {took}"
    facts = [
        ("model", f"{count(summary['params'])} parameters"),
        ("trained", steps + (f", traced again {retraces} times" if retraces else "")),
        ("speed", f"{count(summary.get('tokens_per_s'))} tokens/s, MFU {share(summary.get('mfu'))}{peak}, {waited}"),
        ("training loss", f"{loss(summary.get('train_loss'))} nats/token at the end"),
    ]
    if against := held_against(summary.get("prediction")):
        facts.insert(3, ("prediction", against))
    if summary.get("val_bits_per_byte") is not None:
        facts.append(("held-out text", f"{summary['val_bits_per_byte']:.4f} bits per byte"))
    if summary.get("export"):
        facts.append(("export", str(summary["export"])))
    return facts


def _next(summary: dict[str, Any]) -> list[str]:
    run = shlex.quote(str(summary["run"]))
    prompt = summary.get("example_prompt") or "The "
    return [
        f"podling generate {run} --prompt {shlex.quote(prompt)}",
        f"podling evaluate {run}",
        f"podling export {run} --to hf DIR",
    ]


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
