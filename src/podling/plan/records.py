"""A plan, as records: what was chosen, what it was chosen from, and what the budget buys. No JAX."""

from dataclasses import dataclass, field

from podling.config import Config
from podling.cost.records import Hbm, Layout, StepTime
from podling.plan.target import Target
from podling.tuning import Choice, choices


@dataclass(frozen=True)
class Option:
    """A layout and what is known of it."""

    layout: Layout
    hbm: Hbm
    time: StepTime | None  # None where the compiler refused it
    compile_s: float | None = None  # of the compiler here; None for an estimate without it
    refusal: str = ""  # in words, where the compiler refused it
    compiler_text: str = ""  # file with the compiler's own output
    estimated_s: float | None = None  # the step by estimate alone, also of what was refused

    @property
    def fits(self) -> bool:
        return self.time is not None and self.hbm.fits


@dataclass(frozen=True)
class BudgetUse:
    """Where the time of a session goes."""

    budget_s: float
    start_s: float  # before the first step: Python, data, state; and the compilation
    compile_s: float
    evaluation_s: float
    checkpoint_s: float
    end_s: float  # samples and the export
    train_s: float
    steps: int
    tokens: int
    epochs: float | None  # None when the size of the data is not known
    assumed: tuple[str, ...] = ()  # what was taken for granted, in words


@dataclass(frozen=True)
class Loss:
    """What the loss may come to, in nats per token of held-out text."""

    range: tuple[float, float] | None  # None where no law holds
    words: str  # which law, its source, what it was seen to miss by; or why there is none


@dataclass(frozen=True)
class Size:
    """One size of the ladder, when the plan chooses the model too."""

    name: str
    params: int
    tokens: int  # in the budget
    tokens_per_s: float
    loss_range: tuple[float, float] | None
    compiled: bool  # or else by estimate
    fits: bool
    law_loss: float | None = None  # what sizes are ranked by; None where no law holds


@dataclass(frozen=True)
class Plan:
    """The answer."""

    target: Target
    config: Config  # with the chosen layout in it: what `command` runs
    chosen: Option
    runners_up: tuple[Option, ...]  # best first
    refused: tuple[Option, ...]  # what did not fit, in the order in which it was tried
    tokens_per_s: float
    mfu: float | None  # None where the peak is not known
    peak_flops: float | None  # FLOP/s of one device that mfu is a share of
    params: int
    budget: BudgetUse | None
    loss: Loss | None
    command: str
    plan_s: float
    compiled: int  # programs that were compiled now; the others came from the cache
    sizes: tuple[Size, ...] = ()  # lowest loss first; empty where the model was given
    notes: tuple[str, ...] = field(default=())

    @property
    def choices(self) -> list[Choice]:
        """What the step's form is left to, and what is chosen for this chip."""
        return choices(self.config, self.target.platform, self.target.chip.device_kind)
