"""A model on a mesh, whole: the devices, the arrays, what they take and what they send."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from podling.config import Config
from podling.cost.step_bytes import row_bytes
from podling.layout.grid import Grid
from podling.layout.table import ACTIVATIONS, BATCH, COUNTERS, LAYER, Row, state_rows, step_rows, totals
from podling.layout.traffic import traffic
from podling.model.spec import param_count
from podling.parallel.axes import batch_ways, mesh_text
from podling.train.batch_plan import BatchPlan, plan_batch

ESTIMATE_NOTE = (
    "the compiler's temporaries come on top: a quarter of the memory is kept free for them where podling cuts the batch"
)


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
    device_memory_bytes: int
    """All that one device has."""
    memory_estimate_bytes: dict[str, int]
    """What fills a device in a step, by kind: the state, what the step adds of the parameters' size, and activations.

    Activations are all that the backward pass of one micro-batch needs. The compiler's own temporaries come on top.
    """
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
        return {
            **asdict(self),
            "devices": len(self.grid.cells),
            "state_bytes": self.state_bytes,
            "estimated_bytes": self.estimated_bytes,
        }

    @property
    def estimated_bytes(self) -> int:
        """All of `memory_estimate_bytes` together."""
        return sum(self.memory_estimate_bytes.values())

    @property
    def state_bytes(self) -> int:
        """Bytes on each device between steps: weights, moments and counters, 12 a parameter."""
        return sum(row.device_bytes for row in self.rows if row.rests)


def describe(
    config: Config, grid: Grid, where: str, why: str, memory_bytes: int, dtype: Any, most_tokens: int | None = None
) -> Layout:
    """Lay a model out.

    Args:
        config: resolved; model and batch fit the grid's mesh.
        grid: the devices.
        where: what they are, for people.
        why: why this mesh.
        memory_bytes: all that one device has.
        dtype: compute precision.
        most_tokens: of a micro-batch, see `plan_batch`.
    """
    plan = plan_batch(config, grid.sizes, dtype.itemsize, memory_bytes, most_tokens)
    rows = state_rows(config, grid.sizes) + step_rows(config, grid.sizes, plan, dtype)
    return Layout(
        model=config.model.preset,
        params=param_count(config.model),
        mesh=mesh_text(grid.sizes),
        why=why,
        where=where,
        grid=grid,
        rows=tuple(rows),
        device_memory_bytes=memory_bytes,
        memory_estimate_bytes=_memory(config, grid.sizes, plan, dtype, rows),
        batch=plan,
        dtype=dtype.name,
        traffic=traffic(grid.sizes, rows, plan, config.train.remat),
    )


def _memory(config: Config, sizes: Mapping[str, int], plan: BatchPlan, dtype: Any, rows: list[Row]) -> dict[str, int]:
    # A layer's weights and single activations are part of what the backward pass needs; the rest is too small to draw.
    elsewhere = (LAYER, ACTIVATIONS, BATCH, COUNTERS)
    rows_here = plan.micro_batch // batch_ways(sizes)
    found = {kind: size for kind, size in totals(rows).items() if kind not in elsewhere}
    return {**found, ACTIVATIONS: rows_here * row_bytes(config, dtype.itemsize) // sizes["tensor"]}
