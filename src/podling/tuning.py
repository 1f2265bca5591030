"""What depends on the machine and is chosen for it, in one place: each rule with the measurement that it rests on.

Training, planning and explaining settle a configuration here before they compile it, so they see the same choice; what
a person has set is left alone. Needs no JAX: platform and shapes decide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from podling.config import Config
from podling.errors import InputError, Problem
from podling.kernels import OLD_TPUS, PLATFORM, attention_problem

UNROLLED = 24
"""Layers, at most, that run one after another: a program of more takes minutes to compile."""
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
    not_on: tuple[str, ...] = ()
    """Kinds of device, by JAX's names, that it does not hold for."""


def _always(config: Config) -> bool:
    return True


def _fits(which: str) -> Callable[[Config], bool]:
    """Whether a kernel can take a model, in the precision that accelerators choose."""

    def holds(config: Config) -> bool:
        model, dtype = config.model, "float32" if config.train.dtype == "float32" else "bfloat16"
        return not attention_problem(which, model.context, model.head_dim, model.dropout, dtype)[0]

    return holds


RULES: tuple[Rule, ...] = (
    Rule(
        "attention",
        "tpu",
        _fits("fused"),
        "fused",
        "two heads of 64 over 1024 tokens take 13.1 thousand cycles both ways on v5e, as its compiler schedules them; "
        "splash 30 thousand, and transposes around it",
        not_on=OLD_TPUS,
    ),
    Rule(
        "attention",
        "tpu",
        lambda config: config.model.context > 1024 and _fits("splash")(config),
        "splash",
        "scores of a sequence this long, written to memory, take more than half of a step",
        not_on=OLD_TPUS,
    ),
    Rule("attention", "gpu", _fits("cudnn"), "cudnn", "scores are never written to memory; not measured"),
    Rule("attention", "", _always, "reference", "plain softmax(QK)V"),
    Rule(
        "remat",
        "tpu",
        lambda config: config.model.layers > UNROLLED,
        "dots",
        "layers in a loop copy all that is kept into stacks and out again: less is faster",
    ),
    Rule(
        "remat",
        "cpu",
        lambda config: config.model.context >= 512,
        "dots",
        "gpt2, 2 rows of 512: 3.2 s a step instead of 3.8, 1.3 GB of temporaries instead of 3.1",
    ),
    Rule("remat", "gpu", lambda config: config.model.context >= 512, "dots", "as much as fits; not measured"),
    Rule("remat", "", _always, "none", "nothing is computed twice"),
    Rule(
        "layer_loop",
        "tpu",
        lambda config: config.model.layers <= UNROLLED,
        "unroll",
        "a loop copies what each layer keeps into stacks and out again: gpt2 on v5e takes 95 ms for 16 rows instead of "
        "117; it compiles twice as long",
    ),
    Rule(
        "layer_loop",
        "cpu",
        # Layers apart, XLA finds on a CPU what was to be computed again, and keeps it: remat needs the loop.
        lambda config: config.model.layers <= UNROLLED and config.train.remat == "none",
        "unroll",
        "a loop copies what each layer keeps into stacks and out again: 4 layers of 128 take 26 ms instead of 31",
    ),
    Rule("layer_loop", "", _always, "scan", "one body for all layers: compiles in a fraction of the time"),
    Rule(
        "loss_chunk",
        "tpu",
        lambda config: (
            config.model.vocab_size >= 8192 and config.model.context > 256 and config.model.context % 256 == 0
        ),
        256,
        "16 rows of 1024 scored at once would hold 3.3 GB of logits; no slower in chunks",
    ),
    Rule(
        "loss_chunk",
        "cpu",
        lambda config: (
            config.model.vocab_size >= 8192 and config.model.context > 128 and config.model.context % 128 == 0
        ),
        128,
        "logits of 1024 positions of 50,257 take 0.4 GB with their gradient, and pages that are cleared at every step",
    ),
    Rule("loss_chunk", "", _always, 0, "one pass over the vocabulary"),
)
"""For each field the first rule that holds."""


MICRO_TOKENS = {"cpu": 2048}
"""Tokens of a micro-batch, at most, by platform. For memory: of 6 layers of 384, 16,384 tokens
a step, the temporaries take 0.7 GB in 8 pieces and 5.4 GB in one. What it does to speed was not measured."""


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


def choices(config: Config, platform: str, kind: str = "") -> list[Choice]:
    """What `settled` chooses, and why.

    Args:
        config: resolved.
        platform: "cpu", "gpu" or "tpu".
        kind: of the device, by JAX's name.
    """
    found: list[Choice] = []
    for field in dict.fromkeys(rule.field for rule in RULES):
        if getattr(config.train, field) not in ("auto", AUTO_CHUNK):
            continue
        rule = next(
            r
            for r in RULES
            if r.field == field and r.platform in ("", platform) and kind not in r.not_on and r.holds(config)
        )
        found.append(Choice(field, rule.value, rule.why, said=bool(rule.platform)))
        # Later rules may ask for what earlier ones have chosen.
        config = replace(config, train=replace(config.train, **{field: rule.value}))
    return found


def settled(config: Config, platform: str, kind: str = "") -> Config:
    """The configuration with every choice made; one that leaves none open comes back as it is.

    Raises:
        InputError: it asks for a kernel of another kind of device.
    """
    asked = config.train.attention
    if PLATFORM.get(asked, platform) != platform or (asked in ("fused", "splash") and kind in OLD_TPUS):
        what = f"{asked} is a kernel for {PLATFORM[asked].upper()}s, and this is a {kind or platform.upper()}"
        raise InputError(Problem("--train.attention", what, "auto chooses what the device can run"))
    made = {choice.field: choice.value for choice in choices(config, platform, kind)}
    return replace(config, train=replace(config.train, **made)) if made else config
