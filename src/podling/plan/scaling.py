"""Sizes of a chip compared: the same batch on more chips (strong scaling), and more batch on more (weak scaling)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from podling.config import Config
from podling.errors import InputError, PodlingError, Problem
from podling.plan.records import Plan
from podling.plan.tables import seconds
from podling.plan.target import Target, parse_target
from podling.train.progress.words import count, share

MOST_CHIPS = 256
PlanOf = Callable[[Config, Target], Plan]
How = Literal["strong", "weak"]
HOWS: tuple[How, ...] = ("strong", "weak")
ABOVE = 1.0005
"""An efficiency that shows as more than 100%."""


@dataclass(frozen=True)
class Point:
    """A plan at one number of chips, as far as a table needs it."""

    chip: str  # as after --chip
    devices: int
    batch_tokens: int
    mesh: str = ""
    layout: str = ""  # all of it, in words
    step_s: float | None = None  # None where nothing fits
    step_s_range: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    waiting: float | None = None  # share of the step that waits for collectives
    hbm_bytes: int | None = None
    source: str = ""  # "compiler" or "estimate"
    why: str = ""  # nothing fits


@dataclass(frozen=True)
class Scaling:
    """Both curves."""

    model: str
    chip: str
    strong: tuple[Point, ...]  # the batch of the configuration
    weak: tuple[Point, ...]  # as much of it on each device as the planned target has

    def efficiency(self, how: How) -> list[float | None]:
        """Tokens/s of a device, as a share of that with the fewest devices that fit."""
        each = [p.tokens_per_s / p.devices if p.tokens_per_s else None for p in self.points(how)]
        first = next((value for value in each if value), None)
        return [value / first if value and first else None for value in each]

    def measure(self) -> list[str]:
        """Against which size each curve's efficiency is measured, and what more than 100% means."""
        if not any(point.tokens_per_s for point in (*self.strong, *self.weak)):
            return []
        starts = {how: next((p.devices for p in self.points(how) if p.tokens_per_s), None) for how in HOWS}
        named = [f"{how}: {start} device{'s' * (start != 1)}" for how, start in starts.items() if start]
        words = ["efficiency: tokens/s of a device against the first that fits:", "; ".join(named)]
        if any(value and value > ABOVE for how in HOWS for value in self.efficiency(how)):
            words.append("over 100%: a device is faster there than at that first size")
        return words

    def points(self, how: How) -> tuple[Point, ...]:
        return self.strong if how == "strong" else self.weak

    def record(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            how: [
                {**asdict(point), "efficiency": efficiency}
                for point, efficiency in zip(self.points(how), self.efficiency(how), strict=True)
            ]
            for how in HOWS
        }


def sizes_of(target: Target) -> list[Target]:
    """The targets of this chip that exist, with 1, 2, 4 ... 256 chips (TPUs) or devices, and the target itself.

    Raises:
        InputError: it is a CPU, whose devices share one memory.
    """
    chip = target.chip
    if chip.platform == "cpu":
        what = "the devices of a CPU share its cores and its memory: more of them are no faster"
        raise InputError(Problem("--scaling", what, "give a TPU or a GPU as --chip"))
    found: list[Target] = []
    for chips in (1 << power for power in range(MOST_CHIPS.bit_length())):
        many = f"{chips}x{chip.name}" if chips > 1 else chip.name
        name = f"{chip.name}-{chips * chip.cores}" if chip.platform == "tpu" else many
        try:
            found.append(parse_target(name))
        except InputError:  # it does not come in this size
            continue
    # Of several with its number of devices (a slice of 8 chips, two slices of 4), the planned one.
    others = [size for size in found if size.devices != target.devices]
    return sorted([*others, target], key=lambda size: size.devices)


def weak_batch(config: Config, target: Target, devices: int) -> int:
    """Tokens a step with as many rows on each device as the configuration has on the target's."""
    rows = max(1, config.train.batch_tokens // config.model.context // target.devices)
    return rows * devices * config.model.context


def scale(name: str, config: Config, target: Target, plan_of: PlanOf, say: Callable[[str], None]) -> Scaling:
    """Plan every size of the target's chip, with the one batch and with a batch that grows.

    Args:
        name: of the model, for people.
        config: resolved; its batch is that of the strong curve.
        target: whose rows a device the weak curve keeps.
        plan_of: plans a configuration on a target.
        say: told what is being done.
    """
    targets = sizes_of(target)
    curves: dict[How, list[Point]] = {"strong": [], "weak": []}
    for number, size in enumerate(targets, 1):
        for how, points in curves.items():
            tokens = config.train.batch_tokens if how == "strong" else weak_batch(config, target, size.devices)
            same = next(
                (p for name in curves for p in curves[name] if (p.chip, p.batch_tokens) == (size.text, tokens)), None
            )
            if same is None:
                say(f"scaling, {number} of {len(targets)}: {size.text}, {tokens:,} tokens a step")
            points.append(
                same or _point(replace(config, train=replace(config.train, batch_tokens=tokens)), size, plan_of)
            )
    return Scaling(name, target.chip.name, tuple(curves["strong"]), tuple(curves["weak"]))


def _point(config: Config, target: Target, plan_of: PlanOf) -> Point:
    point = Point(target.text, target.devices, config.train.batch_tokens)
    try:
        plan = plan_of(config, target)
    except PodlingError as error:
        return replace(point, why=error.problems[0].what)
    time, hbm = plan.chosen.time, plan.chosen.hbm
    assert time is not None
    return replace(
        point,
        mesh=plan.chosen.layout.mesh,
        layout=str(plan.chosen.layout),
        step_s=time.step_s,
        step_s_range=time.range_s,
        tokens_per_s=plan.tokens_per_s,
        mfu=plan.mfu,
        waiting=time.parts_s.get("collective", 0.0) / time.step_s,
        hbm_bytes=hbm.total_bytes,
        source=hbm.source,
    )


TITLES: dict[How, str] = {
    "strong": "strong scaling: one batch, shared by more devices",
    "weak": "weak scaling: as many rows on each device, so a larger batch",
}


def show_scaling(scaling: Scaling, console: Console) -> None:
    """Print both tables."""
    for how, heading in TITLES.items():
        console.print()
        console.print(_table(scaling, how, heading))
    for words in scaling.measure():
        console.print(words, style="dim")
    if any(point.source == "estimate" for point in (*scaling.strong, *scaling.weak)):
        console.print("est.: no compiler has seen it, worked out from its sizes", style="dim")


def _table(scaling: Scaling, how: How, heading: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=heading, title_justify="left")
    table.title_style, table.header_style = "bold", "dim"
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("mesh", overflow="fold", min_width=12)
    for name in ("batch", "step", "tokens/s", "efficiency", "MFU", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for point, efficiency in zip(scaling.points(how), scaling.efficiency(how), strict=True):
        if point.step_s is None:
            table.add_row(str(point.devices), "does not fit", count(point.batch_tokens), style="dim")
            continue
        mark = "" if point.source == "compiler" else " est."
        table.add_row(
            str(point.devices),
            point.mesh,
            count(point.batch_tokens),
            Text(seconds(point.step_s) + mark),
            count(point.tokens_per_s),
            share(efficiency),
            share(point.mfu),
            share(point.waiting),
        )
    return table
