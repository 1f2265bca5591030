"""A model on a mesh, whole: the devices, the arrays, what they take and what they send."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from podling.config import Config
from podling.layout.grid import Grid
from podling.layout.table import COUNTERS, GRADIENTS, Row, state_rows, step_rows, totals
from podling.layout.traffic import traffic
from podling.model.spec import param_count
from podling.parallel.axes import batch_ways, mesh_text
from podling.train.batch_plan import BatchPlan, plan_batch, row_bytes


@dataclass(frozen=True)
class Layout:
    """Everything that `podling mesh` shows."""

    model: str
    params: int
    mesh: str
    why: str
    """Why `--mesh auto` chose it; empty when the person did."""
    where: str
    """The devices, for people."""
    grid: Grid
    rows: tuple[Row, ...]
    totals: dict[str, int]
    """Bytes on each device by kind of row."""
    device_bytes: int
    activation_bytes: int
    """Estimate of all that the backward pass of one micro-batch needs on each device."""
    batch: BatchPlan
    dtype: str
    traffic: dict[str, str]

    @property
    def title(self) -> str:
        """Model and devices, for people."""
        count = f"{self.params / 1e6:,.1f}M" if self.params >= 1e6 else f"{self.params:,}"
        return f"{self.model}, {count} parameters, on {self.where}"

    @property
    def sizes(self) -> dict[str, int]:
        return self.grid.sizes

    def record(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "devices": len(self.grid.cells), "state_bytes": self.state_bytes}

    @property
    def state_kinds(self) -> set[str]:
        """Kinds of rows that live from step to step."""
        return {row.kind for row in self.rows if row.rests}

    @property
    def state_bytes(self) -> int:
        """Bytes on each device between steps."""
        return sum(row.device_bytes for row in self.rows if row.rests)


def describe(config: Config, grid: Grid, where: str, why: str, device_bytes: int, dtype: Any) -> Layout:
    """Lay a model out.

    Args:
        config: resolved; model and batch fit the grid's mesh.
        grid: the devices.
        where: what they are, for people.
        why: why this mesh.
        device_bytes: memory of one device.
        dtype: compute precision.
    """
    plan = plan_batch(config, grid.sizes, dtype.itemsize, device_bytes)
    rows = state_rows(config, grid.sizes) + step_rows(config, grid.sizes, plan, dtype)
    return Layout(
        model=config.model.preset,
        params=param_count(config.model),
        mesh=mesh_text(grid.sizes),
        why=why,
        where=where,
        grid=grid,
        rows=tuple(rows),
        totals=totals(rows),
        device_bytes=device_bytes,
        activation_bytes=_activations(config, grid.sizes, plan, dtype),
        batch=plan,
        dtype=dtype.name,
        traffic=traffic(grid.sizes, rows, plan, config.train.remat),
    )


def memory(layout: Layout) -> list[tuple[str, int]]:
    """What fills a device in a step, in bytes: the state by kind, gradients, activations."""
    parts = [(kind, size) for kind, size in layout.totals.items() if kind in layout.state_kinds and kind != COUNTERS]
    return [*parts, (GRADIENTS, layout.totals[GRADIENTS]), ("activations (estimate)", layout.activation_bytes)]


def _activations(config: Config, sizes: Mapping[str, int], plan: BatchPlan, dtype: Any) -> int:
    rows = plan.micro_batch // batch_ways(sizes)
    return rows * row_bytes(config, dtype.itemsize) // sizes["tensor"]
