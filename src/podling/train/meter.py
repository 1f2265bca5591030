"""Where the time of a run goes."""

import time
from collections import deque
from collections.abc import Callable


class Meter:
    """Times steps from one metrics fetch to the next, so that evaluation, saving and compiling are not in them.

    Args:
        tokens: tokens in a step.
        flops_per_token: see `podling.train.flops`.
        peak_flops_per_s: of all devices together; None when unknown, and then MFU is None too.
        clock: seconds; injected in tests.
    """

    WINDOW = 20  # steps behind the displayed speed

    def __init__(
        self,
        tokens: int,
        flops_per_token: int,
        peak_flops_per_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens = tokens
        self._flops_per_token = flops_per_token
        self._peak = peak_flops_per_s
        self._clock = clock
        self._mark: float | None = None
        self._recent: deque[float] = deque(maxlen=self.WINDOW)
        self.steps = 0  # timed ones
        self.train_s = 0.0
        self.wait_s = 0.0
        self._before = (0, 0.0)  # steps and seconds of earlier sessions

    def resume(self) -> None:
        """Start the clock of the next step: at the beginning, and after anything that is not a step."""
        self._mark = self._clock()

    def pause(self) -> None:
        """The next step is not timed unless `resume` comes first."""
        self._mark = None

    def step(self, wait_s: float) -> None:
        """One step is over; `wait_s` of it went into waiting for data."""
        now = self._clock()
        if self._mark is not None:
            self._recent.append(now - self._mark)
            self.train_s += now - self._mark
            self.wait_s += wait_s
            self.steps += 1
        self._mark = now

    @property
    def step_s(self) -> float | None:
        """Mean of the recent steps; None before the first timed one."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def session_step_s(self) -> float | None:
        """Mean over the timed steps of this session; None before the first."""
        steps, train_s = self._before
        return (self.train_s - train_s) / (self.steps - steps) if self.steps > steps else None

    @property
    def is_resumed(self) -> bool:
        """Whether totals cover steps of earlier sessions too."""
        return self._before[0] > 0

    def speed(self, step_s: float | None) -> dict[str, float | None]:
        """`step_s`, `tokens_per_s` and `mfu` at this time per step."""
        tokens_per_s = None if not step_s else self._tokens / step_s
        known = tokens_per_s is not None and self._peak is not None
        mfu = tokens_per_s * self._flops_per_token / self._peak if known else None  # type: ignore[operator]
        return {"step_s": step_s, "tokens_per_s": tokens_per_s, "mfu": mfu}

    def totals(self) -> dict[str, float | None]:
        """`step_s`, `tokens_per_s`, `mfu` and `data_wait_share` over all timed steps."""
        mean_s = self.train_s / self.steps if self.steps else None
        return {**self.speed(mean_s), "data_wait_share": self.data_wait_share}

    @property
    def data_wait_share(self) -> float | None:
        """Share of the steps' time spent waiting for data."""
        return self.wait_s / self.train_s if self.train_s else None

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, so that totals cover every session of a run."""
        return {"steps": self.steps, "train_s": self.train_s, "wait_s": self.wait_s}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state`."""
        self.steps = int(state["steps"])
        self.train_s, self.wait_s = state["train_s"], state["wait_s"]
        self._before = (self.steps, self.train_s)
