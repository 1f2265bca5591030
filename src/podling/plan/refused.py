"""When nothing fits: what needed how much, and what would."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from podling.config import Config
from podling.cost.records import Layout
from podling.errors import Problem
from podling.files import show_binary
from podling.model.fit import batch_problems, fits, mesh_problems
from podling.model.spec import param_count
from podling.parallel.axes import batch_ways, factorisations, read_mesh
from podling.plan.records import Option
from podling.plan.search import Found, layouts
from podling.plan.target import Target
from podling.presets import PRESETS

Best = Callable[[Config, Target, frozenset[str]], Option | None]
"""The fastest layout that fits by estimate, with these flags held; None where there is none."""


def way_out(refused: Option, fitting: Sequence[Option]) -> str:
    """What would have to change for a refused layout to fit, and what that costs; empty where nothing is known to fit.

    Args:
        refused: a layout.
        fitting: those that fit, fastest first.
    """
    if not fitting:
        return ""
    nearest = min(fitting, key=lambda option: len(_changes(refused.layout, option.layout)))
    words = (
        f"with {', '.join(_changes(refused.layout, nearest.layout))} it fits ({show_binary(nearest.hbm.total_bytes)})"
    )
    if refused.estimated_s and nearest.estimated_s:
        slower = nearest.estimated_s / refused.estimated_s - 1
        cost = "at no cost in speed" if slower < 0.005 else f"and takes {slower:.0%} longer"
        words += f" {cost}, by estimate"
    return words


def _changes(before: Layout, after: Layout) -> list[str]:
    """The parts of a layout that differ, as they are afterwards."""
    parts = {
        "mesh": after.mesh,
        "micro_batch": f"{after.micro_batch} rows at a time",
        "remat": f"remat {after.remat}",
        "loss_chunk": f"loss chunks of {after.loss_chunk}" if after.loss_chunk else "the loss in one piece",
    }
    return [words for name, words in parts.items() if getattr(before, name) != getattr(after, name)]


def undivided(config: Config, target: Target, held: frozenset[str]) -> list[Problem]:
    """Why no layout of these devices divides model and batch.

    Args:
        config: resolved.
        target: what was planned for.
        held: flags whose value stays.
    """
    if "--mesh" in held:
        sizes = read_mesh(config.run.mesh)[0]
        return mesh_problems(config, sizes, target.devices)
    free = replace(config, train=replace(config.train, micro_batch=0))
    if "--train.micro-batch" in held and layouts(free, target, held - {"--train.micro-batch"}):
        rows = config.train.batch_tokens // config.model.context
        meshes = [mesh for mesh in factorisations(target.devices) if fits(free, mesh)]
        sizes = [
            micro
            for micro in range(1, rows + 1)
            if rows % micro == 0 and any(micro % batch_ways(mesh) == 0 for mesh in meshes)
        ]
        near = sorted(sizes, key=lambda size: abs(size - config.train.micro_batch))[:2]
        what = f"{config.train.micro_batch} rows at a time do not divide {rows} rows over {target.devices} devices"
        fix = f"--train.micro-batch {' or '.join(map(str, sorted(near)))}" if near else "leave it out"
        return [Problem("--train.micro-batch", what, fix)]
    first, *more = batch_problems(config, {"data": target.devices, "fsdp": 1, "tensor": 1})
    what = f"no mesh of {target.devices} devices divides this model and batch: {first.what}"
    return [Problem(first.where, what, first.fix), *more]


def does_not_fit(config: Config, target: Target, held: frozenset[str], found: Found, best: Best) -> Problem:
    """What to say when every layout was refused.

    Args:
        config: resolved.
        target: what was planned for.
        held: flags whose value stayed.
        found: what was refused.
        best: finds what would fit.
    """
    least = min(found.refused, key=lambda option: option.hbm.total_bytes)
    need, limit = show_binary(least.hbm.total_bytes), show_binary(target.device_bytes)
    what = f"{config.model.preset} does not fit {target.text}: the least it needs is {need} of {limit} on each device"
    if least.compiler_text:
        what += f" ({least.layout}; the compiler's words: {least.compiler_text})"
    fixes = []
    for flag in sorted(held):
        option = best(config, target, held - {flag})
        if option is not None:
            fixes.append(f"without {flag} it should: {option.layout} ({show_binary(option.hbm.total_bytes)})")
    if not fixes:
        fixes = [*_smaller_batch(config, target, held, best), _largest(config, target, best)]
    return Problem("--chip" if not held else min(held), what, "\n    ".join(fixes))


def _smaller_batch(config: Config, target: Target, held: frozenset[str], best: Best) -> list[str]:
    """The largest batch that fits without accumulation, which saves a second copy of the gradients."""
    rows = config.train.batch_tokens // config.model.context
    for share in (2**power for power in range(1, rows.bit_length())):
        if rows % share:
            break
        tokens = config.train.batch_tokens // share
        option = best(replace(config, train=replace(config.train, batch_tokens=tokens)), target, held)
        if option is not None:
            need = show_binary(option.hbm.total_bytes)
            return [f"a smaller batch does, by estimate: --batch-tokens {tokens} ({option.layout}; {need})"]
    return []


def _largest(config: Config, target: Target, best: Best) -> str:
    """The largest preset with GPT-2's vocabulary that fits, or that none does."""
    size = param_count(config.model)
    others = {
        name: replace(config, model=replace(preset.config.model, vocab_size=config.model.vocab_size))
        for name, preset in PRESETS.items()
        if preset.config.model.context == config.model.context
    }
    smaller = {name: other for name, other in others.items() if param_count(other.model) < size}
    for name, other in sorted(smaller.items(), key=lambda item: -param_count(item[1].model)):
        option = best(other, target, frozenset())
        if option is not None:
            need = show_binary(option.hbm.total_bytes)
            return f"the largest preset that does, by estimate: --model {name} ({need}); or more devices"
    return "no smaller preset fits either: more devices, or a chip with more memory"
