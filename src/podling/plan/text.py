"""A plan as text: in a terminal with colours and bars, in a log without; 80 columns are enough."""

from collections.abc import Iterable
from datetime import timedelta

from rich.console import Console
from rich.table import Table
from rich.text import Text

from podling.files import counted, show_binary
from podling.plan.record import model_name
from podling.plan.records import Plan
from podling.plan.refused import way_out
from podling.plan.tables import (
    memory_table,
    ops_table,
    options_table,
    seconds,
    sizes_table,
    tensors_table,
    time_table,
)
from podling.train.progress.words import count, duration, share

MOST_REFUSED = 3


def show(plan: Plan, console: Console) -> None:
    """Print a plan, the answer first."""
    console.print(Text(title(plan), style="bold"))
    for style, line in _answer(plan):
        console.print(Text(line, style=style))
    chosen = plan.chosen
    for block in (
        sizes_table(plan),
        options_table(plan),
        memory_table(chosen),
        tensors_table(chosen),
        time_table(chosen),
        ops_table(chosen),
    ):
        if block is not None:
            console.print()
            console.print(block)
    _say(console, "what the session buys", _buys(plan))
    _say(console, "what did not fit", _refused(plan))
    _say(console, "good to know", [note for note in plan.notes if note != plan.target.approximate])
    console.print()
    console.print(Text("run it:", style="bold"))
    # Never wrapped: what is copied from here is typed again.
    console.print(Text(f"  {plan.command}"), soft_wrap=True)


def title(plan: Plan) -> str:
    """`gpt2, 124M parameters, on v5e-8 (8 x v5e)`."""
    many = f" ({plan.target.devices} x {plan.target.chip.name})" if plan.target.devices > 1 else ""
    return f"{model_name(plan)}, {count(plan.params)} parameters, on {plan.target.text}{many}"


def _answer(plan: Plan) -> list[tuple[str, str]]:
    """What one wants to know at once."""
    hbm, time = plan.chosen.hbm, plan.chosen.time
    used = f"{show_binary(hbm.total_bytes)} of {show_binary(hbm.limit_bytes)} on each device"
    if plan.chosen.fits:
        lines = [("green", f"fits: {used}, {show_binary(hbm.spare_bytes)} to spare")]
    else:
        lines = [("bold red", f"does not fit: {plan.chosen.refusal or used}")]
    if time is not None:
        low, high = time.range_s
        speed = f"{count(plan.tokens_per_s)} tokens/s, MFU {share(plan.mfu)}{_peak(plan)}"
        lines.append(("", f"step: {seconds(time.step_s)} ({seconds(low)} to {seconds(high)}), {speed}"))
    lines.append(("", f"layout: {plan.chosen.layout}"))
    lines += [("", f"chosen: {choice}") for choice in plan.choices if choice.said]
    lines.append(_source(plan))
    if time is not None:
        lines.append(("dim", f"how sure: {time.calibration}"))
    if plan.target.approximate:
        lines.append(("yellow", f"approximate: {plan.target.approximate}"))
    return lines


def _peak(plan: Plan) -> str:
    """What MFU is a share of: ' of 8 x 197 TFLOP/s'."""
    if plan.mfu is None or plan.peak_flops is None:
        return ""
    many = f"{plan.target.devices} x " if plan.target.devices > 1 else ""
    return f" of {many}{plan.peak_flops / 1e12:.3g} TFLOP/s"


def _source(plan: Plan) -> tuple[str, str]:
    if plan.chosen.hbm.source != "compiler":
        return "yellow", "an estimate: no compiler has seen this program, memory and time are worked out from its sizes"
    took = f", which takes {seconds(plan.chosen.compile_s)} here" if plan.chosen.compile_s is not None else ""
    kept = f"{counted(plan.compiled, 'program')} compiled now" if plan.compiled else "all from the cache"
    return "dim", f"from the step as the compiler for {plan.target.chip.name} made it{took}; {kept}"


def _buys(plan: Plan) -> list[str]:
    """Where the session's time goes, the tokens, and what they may come to."""
    lines: list[str] = []
    use, config = plan.budget, plan.config
    if use is None and plan.chosen.time is not None:
        steps = config.train.total_steps
        took = duration(steps * plan.chosen.time.step_s)
        words = (
            f"the {steps:,} steps of the configuration, {count(steps * config.train.batch_tokens)} tokens, take {took}"
        )
        lines.append(f"{words} (--budget TIME plans a session)")
    if use is not None:
        spent = [
            ("starting", use.start_s),
            ("compiling", use.compile_s),
            ("training", use.train_s),
            ("evaluating", use.evaluation_s),
            ("checkpoints", use.checkpoint_s),
            ("samples and export", use.end_s),
        ]
        parts = ", ".join(f"{name} {duration(part)}" for name, part in spent if part >= 0.5)
        lines.append(f"{span(use.budget_s)}: {parts}")
        epochs = f", {_epochs(use.epochs)} epochs of the data" if use.epochs is not None else ""
        lines.append(f"{count(use.tokens)} tokens in {use.steps:,} steps{epochs}")
    if plan.loss is not None:
        if plan.loss.range is not None:
            low, high = plan.loss.range
            lines.append(f"held-out loss of {low:.2f} to {high:.2f} nats/token: {plan.loss.words}")
        else:
            lines.append(f"no forecast of the loss: {plan.loss.words}")
    if use is not None and use.assumed:
        lines.append(f"taken for granted: {'; '.join(use.assumed)}")
    return lines


def _epochs(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def span(length_s: float) -> str:
    """'9:00:00', as a clock shows it."""
    return str(timedelta(seconds=round(length_s)))


def _refused(plan: Plan) -> list[str]:
    lines = []
    for option in plan.refused[:MOST_REFUSED]:
        kept = f" (the compiler's own words: {option.compiler_text})" if option.compiler_text else ""
        out = way_out(option, (plan.chosen, *plan.runners_up) if plan.chosen.fits else ())
        lines.append(f"{option.layout}: {option.refusal}{kept}{f'; {out}' if out else ''}")
    if len(plan.refused) > MOST_REFUSED:
        lines.append(f"and {len(plan.refused) - MOST_REFUSED} more (--json has them)")
    return lines


def _say(console: Console, heading: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if not lines:
        return
    console.print()
    console.print(Text(heading, style="bold"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    console.print(grid)
