"""The whole configuration of a run: five frozen dataclasses, checked all at once.

A field's name, flag, help text and default are written here and nowhere else. `flat(...)` gives a common field a
short flag (`--lr`); every other field is `--section.field`. Nothing here imports JAX or NumPy, so a wrong flag is
answered at once.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from tyro.conf import arg

from podling.errors import InputError, Problem

CONFIG_VERSION = 1


def flat(flag: str) -> Any:
    """A short flag for a common field: `--lr` where the rule would give `--optimizer.lr`."""
    return arg(name=flag, prefix_name=False, help_behavior_hint=shown_default)


def shown_default(default: str) -> str:
    """How the help text shows a default; an empty one is explained by the field's own words."""
    return f"(default: {default})" if default.strip("'") else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A GPT-2: learned positions, pre-LayerNorm, tanh GELU, tied head."""

    preset: Annotated[str, flat("model")] = "gpt2-micro"
    """Named size: gpt2-nano, gpt2-micro, gpt2-mini (laptop); gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads; must divide embed."""
    embed: int = 192
    """Width of the residual stream."""
    mlp: int = 768
    """Width of the MLP's hidden layer; follows --model.embed, as 4 times that, unless given."""
    context: Annotated[int, flat("context")] = 128
    """Tokens the model sees at once; also the length of a training sequence."""
    vocab_size: int = 0
    """Tokens in the vocabulary; 0 takes it from the tokenizer (any other value must agree with it)."""
    dropout: float = 0.0
    """Probability of dropping an activation in training."""

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text to learn from and how it becomes tokens."""

    paths: Annotated[tuple[str, ...], flat("data")] = ()
    """Files, folders, globs, hf:owner/name[:config][:split] or prepared data. Nothing: Python's standard library."""
    tokenizer: Annotated[str, flat("tokenizer")] = "bpe"
    """bpe (trained on the data), gpt2, char, bytes, a tokenizer.json, or a folder with vocab.json/merges.txt."""
    vocab_size: Annotated[int, flat("vocab-size")] = 2048
    """Size of a trained BPE vocabulary, end-of-text included."""
    text_field: Annotated[str, flat("text-field")] = "text"
    """Field or column that holds the text in .jsonl, .parquet and hub datasets."""
    errors: Annotated[Literal["strict", "replace"], flat("errors")] = "strict"
    """Invalid UTF-8: stop and say where, or replace with U+FFFD and count."""
    split_on_eot: Annotated[bool, flat("split-on-eot")] = False
    """Treat a line holding only <|endoftext|> as a document boundary in plain text files."""
    limit: Annotated[str, flat("limit")] = ""
    """Stop reading after this much text, e.g. 10GB. Nothing: read everything."""
    holdout: float = 0.05
    """Share of the text held out for evaluation: by document hash, or the tail of a single document."""
    cache: Annotated[str, arg(help_behavior_hint=shown_default)] = ""
    """Folder for prepared data. Nothing: $XDG_CACHE_HOME/podling/prepared (~/.cache/podling/prepared)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019) and a learning-rate schedule."""

    lr: Annotated[float, flat("lr")] = 4e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """Shape after warm-up: cosine, linear, or constant with a linear decay at the end (warm-up, stable, decay)."""
    warmup_steps: int = 50
    """Steps of linear warm-up from zero."""
    lr_floor: float = 0.1
    """Final learning rate as a fraction of the peak."""
    decay_fraction: float = 0.2
    """wsd only: share of the steps that decay."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings; biases and LayerNorm parameters are never decayed."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, how much at a time, and in what precision."""

    steps: Annotated[int, flat("steps")] = 700
    """Optimizer steps."""
    tokens: Annotated[int, flat("tokens")] = 0
    """Training tokens instead of steps; rounded up to a whole step."""
    batch_tokens: Annotated[int, flat("batch-tokens")] = 2048
    """Tokens in one optimizer step over all devices: a multiple of the context."""
    micro_batch: int = 0
    """Sequences in one forward pass over all devices; 0 derives the largest that fits the device."""
    seed: Annotated[int, flat("seed")] = 0
    """Seeds initialisation, data order and dropout."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], flat("dtype")] = "auto"
    """Compute precision; master weights and loss stay float32. auto: bfloat16 on TPU and GPU, float32 on CPU."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """What the backward pass recomputes: nothing, all but matmul results, or whole blocks; auto chooses."""
    attention: Literal["auto", "reference", "fused", "splash", "cudnn"] = "auto"
    """How attention is computed: reference (plain softmax), fused or splash (TPU kernels), cudnn (GPU kernel); auto
    chooses."""
    layer_loop: Literal["auto", "scan", "unroll"] = "auto"
    """Layers as one loop, or one after another (longer to compile); auto chooses for the device."""
    loss_chunk: int = -1
    """Positions per chunk of the loss, so that full logits never exist; must divide the context; 0 for one piece, -1
    chooses."""
    eval_every: Annotated[int, flat("eval-every")] = 250
    """Steps between evaluations; 0 for only the one at the end."""
    eval_tokens: int = 65536
    """Held-out tokens per evaluation: the same windows every time; 0 for all of them."""
    samples: int = 20
    """Samples written at the end."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, `tokens` rounded up to whole ones; 0 where the numbers make no sense."""
        if self.tokens > 0 and self.batch_tokens > 0:
            return -(-self.tokens // self.batch_tokens)
        return max(0, self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where the run lives, what it runs on, and what it keeps."""

    out: Annotated[str, flat("out")] = "runs/default"
    """Run folder; the same command on the same folder continues the run."""
    init: Annotated[str, flat("init")] = ""
    """Start from the weights of this run or imported model instead of random ones."""
    device: Annotated[Literal["auto", "cpu", "gpu", "tpu"], flat("device")] = "auto"
    """Device to use; asking for one that is not there is an error, never a silent fallback."""
    mesh: Annotated[str, flat("mesh")] = "auto"
    """Devices per mesh axis, e.g. data=4,tensor=2; auto: all on data, but as many on fsdp as the state needs."""
    checkpoint_every: Annotated[int, flat("checkpoint-every")] = 250
    """Steps between checkpoints; 0 for only the one at the end."""
    keep: int = 2
    """Checkpoints kept besides the best one."""
    log_every: int = 10
    """Steps between printed lines where there is no terminal."""
    tensorboard: bool = True
    """Write TensorBoard events to RUN/tensorboard."""
    wandb: Annotated[str, arg(help_behavior_hint=shown_default)] = ""
    """Weights & Biases project to log to (needs the wandb extra)."""
    export: bool = True
    """Write a Hugging Face export to RUN/export at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that decides what a run computes, and where it is kept."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True)
class Flag:
    """How one field of the configuration is given on the command line."""

    name: str
    """`--lr`, `--model.layers`."""
    section: str
    field: str
    type: Any
    """Its annotation, without the flag."""


def flags() -> list[Flag]:
    """Every field of the configuration with its flag, in order."""
    found: list[Flag] = []
    for section in dataclasses.fields(Config):
        cls: Any = section.default_factory
        for name, hint in get_type_hints(cls, include_extras=True).items():
            extras = getattr(hint, "__metadata__", ())
            short = [extra.name for extra in extras if extra.name]
            flag = short[0] if short else f"{section.name}.{name.replace('_', '-')}"
            found.append(Flag(f"--{flag}", section.name, name, hint.__origin__ if extras else hint))
    return found


def to_dict(config: Config) -> dict[str, Any]:
    """JSON-ready form, with the version of the format."""
    return {"version": CONFIG_VERSION, **dataclasses.asdict(config)}


def from_dict(data: dict[str, Any], where: str) -> Config:
    """Strict inverse of `to_dict`; missing sections and fields take their defaults.

    Args:
        data: parsed JSON.
        where: name of the source, for messages.

    Raises:
        InputError: with every unknown field, wrong type or unknown version.
    """
    problems: list[Problem] = []
    data = dict(data)
    version = data.pop("version", CONFIG_VERSION)
    if version != CONFIG_VERSION:
        raise InputError(Problem(where, f"configuration version {version!r}", f"this podling reads {CONFIG_VERSION}"))
    sections: dict[str, Any] = {}
    known = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for name, values in data.items():
        if name not in known:
            problems.append(Problem(f"{where}: {name}", "unknown section", did_you_mean(name, known)))
        elif not isinstance(values, dict):
            problems.append(Problem(f"{where}: {name}", "is not an object of fields"))
        else:
            sections[name] = _section(known[name], values, f"{where}: {name}", problems)
    if problems:
        raise InputError(problems)
    return Config(**sections)


def _section(cls: Any, values: dict[str, Any], where: str, problems: list[Problem]) -> Any:
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name not in defaults:
            problems.append(Problem(f"{where}.{name}", "unknown field", did_you_mean(name, defaults)))
            continue
        wanted = type(defaults[name])
        if wanted is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = tuple(value)
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            problems.append(Problem(f"{where}.{name}", f"{value!r} is not {wanted.__name__}"))
            continue
        kept[name] = value
    return cls(**kept)


def did_you_mean(name: str, known: Any) -> str:
    """A hint naming the nearest known name, or all of them when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "known: " + ", ".join(known)
