"""What the loop may tell a person."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from podling.data.events import PrepareEvent


class Baselines(Protocol):
    """Losses of models that only count, in nats per token on the same held-out tokens."""

    @property
    def unigram_loss(self) -> float: ...  # noqa: D102
    @property
    def bigram_loss(self) -> float: ...  # noqa: D102


class Reporter(Protocol):
    """Shows a run while it happens. Nothing here fails because a terminal or a pipe went away."""

    def say(self, text: str) -> None:
        """One thing worth knowing, which stays on the screen."""
        ...

    def status(self, text: str, about_s: float | None = None) -> AbstractContextManager[Callable[[str], None]]:
        """Something without steps is going on; `about_s` is how long it usually takes.

        Gives a function that takes words on how far it is.
        """
        ...

    def preparing(self) -> AbstractContextManager[Callable[[PrepareEvent], None]]:
        """Text is being prepared; gives the function that takes its events."""
        ...

    def begin(self, total_steps: int, start: int, baseline: Baselines | None = None) -> None:
        """Steps begin, after `start` that are done."""
        ...

    def step(self, record: dict[str, Any]) -> None:
        """One optimizer step; unknown figures are None.

        Its fields: `step, loss, lr, grad_norm, tokens, step_s, tokens_per_s, mfu, data_wait_share, left_s, elapsed_s,
        retraces`.
        """
        ...

    def evaluation(self, record: dict[str, Any]) -> None:
        """One evaluation: `step, val_loss, val_perplexity, val_bits_per_byte`."""
        ...

    def sample(self, text: str) -> None:
        """Text the model wrote."""
        ...

    def summary(self, summary: dict[str, Any]) -> None:
        """What the run came to, and what to do with it."""
        ...

    def close(self) -> None:
        """Leave the screen in order. Called again, it does nothing."""
        ...
