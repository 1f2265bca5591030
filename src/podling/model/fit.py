"""Which meshes a model and its batch can be laid over, and what to change where they cannot.

Needs no JAX: the sizes alone decide. That they are the ones that parameters and activations are split by is held by a
test against the spec tree and the table of axes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from podling.config import Config, ModelConfig
from podling.errors import Problem
from podling.parallel.axes import batch_ways, count_problem, listed_meshes, nearest_meshes

VOCAB_MULTIPLE = 128  # the vocabulary is padded to whole tiles of the matrix unit, and so that it divides over `tensor`


def padded_vocab(cfg: ModelConfig) -> int:
    """Rows of the token embedding: the vocabulary, up to a multiple of 128."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class Divided:
    """A size that is split over a mesh axis, and how to say that it cannot be."""

    flag: str
    size: int
    axis: str
    words: str


def divided(model: ModelConfig) -> list[Divided]:
    """Every size of the model that must divide over a mesh axis; the vocabulary once it is known."""
    vocab = f"the vocabulary of {model.vocab_size}, padded to {padded_vocab(model)} does not"
    sizes = [
        Divided("--model.heads", model.heads, "tensor", f"{model.heads} heads do not"),
        Divided("--model.mlp", model.mlp, "tensor", f"an mlp of {model.mlp} does not"),
        Divided("--model.embed", model.embed, "fsdp", f"an embed of {model.embed} does not"),
        # Positions are stored over tensor, and between blocks the sequence is split over it.
        Divided("--context", model.context, "tensor", f"a context of {model.context} does not"),
        Divided("--tokenizer", padded_vocab(model), "tensor", vocab),
    ]
    return [part for part in sizes if part.size]


def mesh_problems(config: Config, sizes: Mapping[str, int], devices: int) -> list[Problem]:
    """Everything that keeps a model and its batch from a mesh, each with the nearest meshes and sizes that work.

    Args:
        config: model and batch; a `vocab_size` of 0 is not known yet and leaves the vocabulary out.
        sizes: devices on each mesh axis.
        devices: how many there are.
    """
    near = nearest_meshes(sizes, devices, lambda mesh: fits(config, mesh))
    if near:
        meshes = f"nearest --mesh that fits: {listed_meshes(near)}"
    else:
        meshes = f"no mesh of {devices} {'device' if devices == 1 else 'devices'} fits this model and batch"
    problems = count_problem(sizes, devices, meshes)
    for part in _undivided(config.model, sizes):
        what = f"{part.words} divide over {part.axis}={sizes[part.axis]}"
        problems.append(Problem(part.flag, what, f"{meshes}\n    or {_sizes_that_fit(part, config, sizes)}"))
    for bad in batch_problems(config, sizes):
        problems.append(Problem(bad.where, bad.what, f"{meshes}\n    or {bad.fix}"))
    return problems


def fits(config: Config, sizes: Mapping[str, int]) -> bool:
    """Whether model and batch divide over a mesh."""
    return not _undivided(config.model, sizes) and not batch_problems(config, sizes)


def batch_problems(config: Config, sizes: Mapping[str, int]) -> list[Problem]:
    """What of the batch does not divide: tokens into rows, rows over data x fsdp and into micro-batches, those too."""
    ways, context, tokens = batch_ways(sizes), config.model.context, config.train.batch_tokens
    rows, micro = tokens // context, config.train.micro_batch
    problems: list[Problem] = []
    if tokens % context or rows % ways:
        what = f"{tokens} tokens are not whole rows of {context} over data x fsdp = {ways}"
        near = _either(multiples_near(tokens, ways * context))
        problems.append(Problem("--batch-tokens", what, f"a multiple of {ways * context}: --batch-tokens {near}"))
    if micro and (micro % ways or rows % micro):
        at_once = f"{micro} row at a time does" if micro == 1 else f"{micro} rows at a time do"
        what = f"{at_once} not divide {rows} rows over data x fsdp = {ways}"
        fix = f"use a multiple of {ways} that divides {rows}; --train.micro-batch 0 finds one"
        problems.append(Problem("--train.micro-batch", what, fix))
    return problems


def _undivided(model: ModelConfig, sizes: Mapping[str, int]) -> list[Divided]:
    return [part for part in divided(model) if part.size % sizes[part.axis]]


def _sizes_that_fit(part: Divided, config: Config, sizes: Mapping[str, int]) -> str:
    """The nearest values of one size that divide, with those that must follow it."""
    over, model = sizes[part.axis], config.model
    if part.flag == "--model.heads":
        near = _heads_near(model.heads, model.embed, over)
        return f"--model.heads {_either(sorted(near[:2]))}" if near else _widths_that_fit(model, sizes)
    if part.flag == "--model.embed":
        return _widths_that_fit(model, sizes)
    if part.flag == "--context":
        near = _either(multiples_near(model.context, math.lcm(over, config.train.loss_chunk or 1)))
        return f"--context {near}, with --batch-tokens a multiple of it"
    if part.flag == "--tokenizer":
        near = _either(multiples_near(part.size, math.lcm(over, VOCAB_MULTIPLE)))
        if config.data.tokenizer == "bpe":
            return f"--vocab-size {near}"
        return f"a tokenizer of {near} tokens (the vocabulary is the tokenizer's, padded to a multiple of 128)"
    return f"{part.flag} {_either(multiples_near(part.size, over))}"


def _widths_that_fit(model: ModelConfig, sizes: Mapping[str, int]) -> str:
    """The nearest embeds that divide over fsdp, each with the heads that divide it and over tensor."""
    found: list[str] = []
    for embed in multiples_near(model.embed, math.lcm(sizes["fsdp"], sizes["tensor"])):
        # Of the heads that divide, those of about the same head_dim.
        wanted = round(embed / model.head_dim)
        heads = _heads_near(wanted, embed, sizes["tensor"])[0]
        found.append(f"--model.embed {embed}" + (f" --model.heads {heads}" if heads != model.heads else ""))
    return " or ".join(found)


def _heads_near(heads: int, embed: int, tensor: int) -> list[int]:
    """Numbers of heads that divide `embed` and over `tensor`, nearest first."""
    found = [number for number in range(tensor, embed + 1, tensor) if embed % number == 0]
    return sorted(found, key=lambda number: abs(number - heads))


def multiples_near(number: int, step: int) -> list[int]:
    """The multiples of `step` on both sides of `number` (or `number` itself), leaving out 0."""
    below = number // step * step
    return [value for value in ((below,) if below == number else (below, below + step)) if value]


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
