"""What a person chooses about generated text. No JAX here, so a wrong value is answered at once."""

from dataclasses import dataclass, replace
from typing import Annotated

from tyro.conf import arg

from podling.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How tokens are drawn, and when to stop."""

    max_tokens: int = 200
    """Tokens to draw for each prompt, at most."""
    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw from the k most likely tokens only; 0 keeps all."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens with at least this much probability; 1 keeps all."""
    min_p: float = 0.0
    """Draw from tokens at least this probable relative to the most likely one; 0 keeps all."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT [TEXT ...]", help_behavior_hint="")] = ()
    """Strings that end a text; they are not part of it."""
    seed: int = 0
    """Prompt number r (from 0) draws with seed + r, so alone with that seed it gives the same text."""

    def problems(self) -> list[Problem]:
        """Every value outside its range, named by its flag."""
        found = []
        if self.max_tokens < 1:
            found.append(Problem("--max-tokens", f"{self.max_tokens} is less than 1"))
        if not 0 <= self.temperature < float("inf"):
            found.append(Problem("--temperature", f"{self.temperature} is not a number >= 0", "0 takes the best token"))
        if self.top_k < 0:
            found.append(Problem("--top-k", f"{self.top_k} is negative", "0 keeps the whole vocabulary"))
        if not 0 < self.top_p <= 1:
            found.append(Problem("--top-p", f"{self.top_p} is not in (0, 1]", "1 keeps the whole vocabulary"))
        if not 0 <= self.min_p <= 1:
            found.append(Problem("--min-p", f"{self.min_p} is not in [0, 1]", "0 keeps the whole vocabulary"))
        if "" in self.stop:
            found.append(Problem("--stop", "an empty string would stop before the first character"))
        if not 0 <= self.seed < 2**32:
            found.append(Problem("--seed", f"{self.seed} is not in [0, 2^32)"))
        return found

    def for_row(self, row: int) -> "Settings":
        """The settings under which prompt number `row` alone gives what it gives in the batch."""
        return replace(self, seed=(self.seed + row) % 2**32)
