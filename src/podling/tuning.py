"""What depends on the machine and is chosen for it, in one place: each rule with the measurement that it rests on.

Training, planning and explaining settle a configuration here before they compile it, so they see the same choice; what
a person has set is left alone. Needs no JAX: platform and shapes decide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from podling.config import Config

AUTO_CHUNK = -1
"""`--train.loss-chunk` that is to be chosen."""


@dataclass(frozen=True)
class Rule:
    """A choice for the configurations that it holds for."""

    field: str  # of TrainConfig
    platform: str  # "cpu", "gpu", "tpu", or "" for every one
    holds: Callable[[Config], bool]
    value: str | int
    why: str
    """Why, with the figures that were measured."""


def _always(config: Config) -> bool:
    return True


RULES: tuple[Rule, ...] = (
    Rule("attention", "", _always, "reference", "plain softmax(QK)V"),
    Rule("layer_loop", "", _always, "scan", "one body for all layers: compiles in a fraction of the time"),
    Rule("loss_chunk", "", _always, 0, "one pass over the vocabulary"),
)
"""For each field the first rule that holds."""


@dataclass(frozen=True)
class Choice:
    """A field that was settled."""

    field: str
    value: str | int
    why: str
    said: bool
    """Other than the plainest: worth a line where a run begins."""

    def __str__(self) -> str:
        return f"{self.field.replace('_', ' ')} {self.value} ({self.why})"


def choices(config: Config, platform: str) -> list[Choice]:
    """What `settled` chooses, and why.

    Args:
        config: resolved.
        platform: "cpu", "gpu" or "tpu".
    """
    found: list[Choice] = []
    for field in dict.fromkeys(rule.field for rule in RULES):
        if getattr(config.train, field) not in ("auto", AUTO_CHUNK):
            continue
        rule = next(r for r in RULES if r.field == field and r.platform in ("", platform) and r.holds(config))
        found.append(Choice(field, rule.value, rule.why, said=bool(rule.platform)))
    return found


def settled(config: Config, platform: str) -> Config:
    """The configuration with every choice made; one that leaves none open comes back as it is."""
    made = {choice.field: choice.value for choice in choices(config, platform)}
    return replace(config, train=replace(config.train, **made)) if made else config
