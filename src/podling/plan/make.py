"""From a configuration, a target and a budget to a plan."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from podling.config import Config
from podling.cost.analytic import estimate_hbm, estimate_time
from podling.cost.records import Layout
from podling.cost.scaling_law import forecast
from podling.errors import InputError, Problem, raise_if
from podling.files import show_binary
from podling.model.spec import param_count
from podling.parallel.device import compute_dtype, peak_flops
from podling.plan.budget import spend, within
from podling.plan.cache import Programs
from podling.plan.command import train_command
from podling.plan.compile import Compiler, with_layout
from podling.plan.overhead import overhead_notes
from podling.plan.records import Loss, Option, Plan
from podling.plan.refused import does_not_fit, undivided
from podling.plan.search import Found, Limits, best_first, layouts, search
from podling.plan.target import Target
from podling.topology import compiler_missing
from podling.train.flops import flops_per_token
from podling.tuning import settled

HELD = ("--mesh", "--train.micro-batch", "--train.remat", "--train.loss-chunk")
"""Flags that fix a part of the layout when they are given."""
SHOWN = 5  # runners-up and refusals


def make_plan(
    config: Config,
    given: frozenset[str],
    target: Target,
    budget_s: float | None,
    data_tokens: int | None,
    say: Callable[[str], None],
    limits: Limits,
    most_steps: int | None = None,
) -> Plan:
    """Choose the layout, and say what the budget buys.

    Args:
        config: validated, with `vocab_size` known.
        given: the flags that the person typed; those of `HELD` stay as they are.
        target: what to plan for.
        budget_s: seconds of the session; None plans the configuration's own steps.
        data_tokens: training tokens there are; None when it is not known.
        say: told what is being done.
        limits: of the search.
        most_steps: the budget is spent on no more than these.

    Raises:
        InputError: nothing fits, or the budget is too short to begin.
        RunError: the compiler died.
    """
    began_s = time.monotonic()
    if target.platform == "cpu" and target.devices > 1:
        what = f"{target.text}: the devices of a CPU share its cores, and how fast they are together is not foretold"
        raise InputError(Problem("--chip", what, "plan for --chip cpu"))
    settled(config, target.platform, target.chip.device_kind)  # refuses what the chip has no kernel for
    held = frozenset(given) & frozenset(HELD)
    itemsize = compute_dtype(config.train.dtype, target.platform).itemsize
    space = layouts(config, target, held)
    if not space:
        raise_if(undivided(config, target, held))
    candidates = [estimated(config, layout, target, itemsize) for layout in space]
    missing = compiler_missing() if target.platform == "tpu" else None
    compiler = None
    if target.platform == "gpu" or missing:
        found = by_estimate(candidates)
    else:
        programs = Programs(limits.cache)
        programs.tidy()
        compiler = Compiler(config, target, programs, say)
        found = search(candidates, compiler.option, limits)
    if not found.fitting:
        raise InputError(does_not_fit(config, target, held, found, best_estimate))
    chosen = found.fitting[0]
    notes = [target.approximate] if target.approximate else []
    if missing:
        notes.append(f"estimated: the TPU compiler is not here ({missing})")
    if target.platform == "gpu":
        notes.append("estimated: podling has no compiler for GPUs away from one")
    config = with_layout(config, chosen.layout)
    return _plan(config, given, target, found, budget_s, data_tokens, most_steps, notes, compiler, began_s)


def estimated(config: Config, layout: Layout, target: Target, itemsize: int) -> Option:
    """A layout with its analytic estimates."""
    inside = settled(with_layout(config, layout), target.platform, target.chip.device_kind)
    hbm = estimate_hbm(inside, layout, target.chip, itemsize)
    hbm = replace(hbm, limit_bytes=target.device_bytes)
    return Option(layout, hbm, estimate_time(inside, layout, target.devices, target.chip, itemsize, target.joined))


def best_estimate(config: Config, target: Target, held: frozenset[str]) -> Option | None:
    """The best layout that fits by estimate, with these flags held; None where there is none."""
    itemsize = compute_dtype(config.train.dtype, target.platform).itemsize
    options = (estimated(config, layout, target, itemsize) for layout in layouts(config, target, held))
    return next(iter(best_first(option for option in options if option.fits)), None)


def by_estimate(candidates: Sequence[Option]) -> Found:
    """The candidates by their estimates, best first, where there is no compiler to ask."""
    fitting = best_first(option for option in candidates if option.fits)
    refused = sorted((option for option in candidates if not option.fits), key=lambda option: option.hbm.total_bytes)
    refused = [replace(option, time=None, refusal=_too_much(option)) for option in refused[:SHOWN]]
    return Found(fitting, tuple(refused), len(candidates))


def _too_much(option: Option) -> str:
    return f"needs about {show_binary(option.hbm.total_bytes)} of {show_binary(option.hbm.limit_bytes)}"


def _peak(config: Config, target: Target) -> float | None:
    """FLOP/s that MFU is a share of: published, but measured on a CPU."""
    dtype = compute_dtype(config.train.dtype, target.platform)
    if target.platform != "cpu":
        return target.chip.peak_flops.get(dtype.name)
    return peak_flops(jax.devices("cpu")[:1], dtype).flops_per_s


def _plan(
    config: Config,
    given: frozenset[str],
    target: Target,
    found: Found,
    budget_s: float | None,
    data_tokens: int | None,
    most_steps: int | None,
    notes: list[str],
    compiler: Compiler | None,
    began_s: float,
) -> Plan:
    """The fastest that was found, with what the budget makes of it."""
    chosen = found.fitting[0]
    assert chosen.time is not None
    step_s = chosen.time.step_s
    tokens_per_s = config.train.batch_tokens / step_s
    use = None
    if budget_s is not None:
        use = spend(config, target, step_s, chosen.compile_s, budget_s, data_tokens, most_steps)
        notes = [*notes, *overhead_notes(config, target, step_s, chosen.compile_s, use, data_tokens)]
        before, config = config.optimizer.warmup_steps, within(config, use, given)
        if config.optimizer.warmup_steps != before:
            notes = [
                *notes,
                f"the warm-up is cut from {before} steps to {config.optimizer.warmup_steps}, a tenth of the run",
            ]
    tokens = config.train.total_steps * config.train.batch_tokens
    params = param_count(config.model)
    epochs = tokens / data_tokens if data_tokens else None
    peak = _peak(config, target)
    return Plan(
        target=target,
        config=config,
        chosen=chosen,
        runners_up=found.fitting[1 : SHOWN + 1],
        refused=found.refused[:SHOWN],
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * flops_per_token(config.model) / (peak * target.devices) if peak else None,
        peak_flops=peak,
        params=params,
        budget=use,
        loss=Loss(*forecast(params, tokens, epochs, config.model.vocab_size)),
        command=train_command(config),
        plan_s=time.monotonic() - began_s,
        compiled=compiler.compiled if compiler else 0,
        notes=tuple(notes),
    )
