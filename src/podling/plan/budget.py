"""What a session's time goes to, and how many steps that leaves."""

import math
import re
from collections.abc import Collection
from dataclasses import replace

from podling.config import Config
from podling.errors import InputError, Problem
from podling.plan.data_size import heldout_tokens
from podling.plan.records import BudgetUse
from podling.plan.target import Target

START_S = {"tpu": 45.0, "gpu": 20.0, "cpu": 5.0}
"""Python, JAX, the devices, the first state."""
END_S = {"tpu": 60.0, "gpu": 30.0, "cpu": 10.0}
"""Samples and the export, both compiled anew."""
COMPILE_S = 60.0  # where no compiler has been asked
STATE_BYTES = 12  # a parameter and its two moments, in float32
FORWARD = 1 / 3  # the share of a training step that an evaluation of as many tokens takes
COPY_BYTES_PER_S, DISK_BYTES_PER_S = 2e9, 200e6
"""Of one host: off the devices, while training waits; and onto the disk, beside it."""
CHIPS_PER_HOST, ONE_HOST = 4, 8
"""Of TPUs, as the cloud puts them together; up to eight v5e or v6e are one host."""
LONGEST_S = 10 * 365 * 86400

UNITS_S = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}


def parse_budget(text: str) -> float:
    """Seconds of `9h`, `85m`, `8h30m`, `1.5h` or `90s`.

    Raises:
        InputError: it is no such time, none at all, or longer than ten years.
    """
    number, clean = r"(\d+(?:\.\d+)?)", re.sub(r"\s", "", text.lower())
    parts = re.findall(number + "(min|[dhms])", clean)
    budget_s = sum(float(count) * UNITS_S[unit] for count, unit in parts)
    if "".join(count + unit for count, unit in parts) != clean or not budget_s:
        raise InputError(Problem("--budget", f"{text!r} is no length of time", "for example 9h, 85m, 8h30m, 90s"))
    if budget_s > LONGEST_S:
        raise InputError(Problem("--budget", f"{text!r} is longer than ten years", "for example 9h, 85m, 8h30m, 90s"))
    return budget_s


def spend(
    config: Config,
    target: Target,
    step_s: float,
    compile_s: float | None,
    budget_s: float,
    data_tokens: int | None,
    most_steps: int | None = None,
) -> BudgetUse:
    """As many steps as a session has time for, with the evaluations and checkpoints that come with them.

    Args:
        config: gives the size of a step, and how often it is evaluated and saved.
        target: the devices.
        step_s: seconds of an optimizer step.
        compile_s: of the step's program; None when that is not known.
        budget_s: seconds of the session.
        data_tokens: training tokens there are; None when that is not known.
        most_steps: not more than these, though there be time.

    Raises:
        InputError: there is no time for one step and one checkpoint.
    """
    from podling.model.spec import param_count  # imports JAX, and a budget is read before that starts

    assumed = _assumed(config, target, compile_s, data_tokens)
    host_bytes = STATE_BYTES * param_count(config.model) / hosts(target)
    compile_s = (1 + FORWARD) * (COMPILE_S if compile_s is None else compile_s)  # and the evaluation's program
    eval_s = step_s * FORWARD * _eval_tokens(config, data_tokens) / config.train.batch_tokens

    def use(steps: int) -> BudgetUse:
        return BudgetUse(
            budget_s=budget_s,
            start_s=START_S[target.platform],
            compile_s=compile_s,
            evaluation_s=eval_s * _times(steps, config.train.eval_every),
            checkpoint_s=_saving_s(steps, step_s, config.run.checkpoint_every, host_bytes),
            end_s=END_S[target.platform],
            train_s=steps * step_s,
            steps=steps,
            tokens=steps * config.train.batch_tokens,
            epochs=steps * config.train.batch_tokens / data_tokens if data_tokens else None,
            assumed=assumed,
        )

    if total_s(use(1)) > budget_s:
        raise InputError(_too_short(use(1)))
    steps, beyond = 1, 1 + int(budget_s / step_s)  # there is time for the first of them, and none for the last
    beyond = beyond if most_steps is None else min(beyond, most_steps + 1)
    while beyond - steps > 1:
        middle = (steps + beyond) // 2
        steps, beyond = (middle, beyond) if total_s(use(middle)) <= budget_s else (steps, middle)
    return use(steps)


def within(config: Config, use: BudgetUse, given: Collection[str]) -> Config:
    """The configuration of a run of so many steps.

    A warm-up written for a longer run is cut to a tenth of this one, where the person has not typed it.

    Args:
        config: of any number of steps.
        use: of the budget.
        given: the flags that were typed.

    Raises:
        InputError: the warm-up that was typed is longer than the run.
    """
    warmup, tenth = config.optimizer.warmup_steps, max(1, use.steps // 10)
    if "--optimizer.warmup-steps" in given:
        if warmup > use.steps:
            what = f"a warm-up of {warmup} steps is longer than the {use.steps} that the budget has time for"
            raise InputError(Problem("--optimizer.warmup-steps", what, f"at most {use.steps}; a tenth is {tenth}"))
        tenth = warmup
    train = replace(config.train, steps=use.steps, tokens=0)
    return replace(config, train=train, optimizer=replace(config.optimizer, warmup_steps=min(warmup, tenth)))


def total_s(use: BudgetUse) -> float:
    """All that the session's time goes to."""
    return use.start_s + use.compile_s + use.evaluation_s + use.checkpoint_s + use.end_s + use.train_s


def hosts(target: Target) -> int:
    """Machines that the devices are in; each writes its own part of a checkpoint."""
    if target.topology is None:
        return target.slices  # of GPUs, the machines
    chips, kind = math.prod(target.topology.shape), target.topology.kind
    together = kind in ("v5e", "v6e") and chips <= ONE_HOST
    return target.slices * (1 if together else -(-chips // CHIPS_PER_HOST))


def _times(steps: int, every: int) -> int:
    """How often something comes that is done every so many steps and at the end."""
    return -(-steps // every) if every else 1


def _saving_s(steps: int, step_s: float, every: int, host_bytes: float) -> float:
    """What training waits for checkpoints: for the copy, for the one before if it is still written, for the last."""
    copy_s, write_s = host_bytes / COPY_BYTES_PER_S, host_bytes / DISK_BYTES_PER_S
    waits_s = max(0.0, write_s - every * step_s)
    return _times(steps, every) * copy_s + (_times(steps, every) - 1) * waits_s + write_s


def _eval_tokens(config: Config, data_tokens: int | None) -> float:
    """Tokens of one evaluation: as many as are asked for, but no more than are held out."""
    held_out, asked = heldout_tokens(config.data, data_tokens), config.train.eval_tokens
    if held_out is None:
        return asked
    return min(asked, held_out) if asked else held_out


def _assumed(config: Config, target: Target, compile_s: float | None, data_tokens: int | None) -> tuple[str, ...]:
    start_s, end_s, many = START_S[target.platform], END_S[target.platform], hosts(target)
    each = f"each of the {many} hosts copies its part of the state" if many > 1 else "the state is copied"
    words = [
        "the data is prepared",
        f"{start_s:.0f} s to start, {end_s:.0f} s for samples and export at the end",
        f"{each} at {COPY_BYTES_PER_S / 1e9:.0f} GB/s and {'writes it' if many > 1 else 'written'} at "
        f"{DISK_BYTES_PER_S / 1e6:.0f} MB/s",
        "the evaluation takes a third of training's time for a token, and a third to compile",
    ]
    if compile_s is None:
        words.append(f"{COMPILE_S:.0f} s to compile")
    elif target.platform != "cpu":
        words.append("compiling takes as long there as here")
    if not config.train.eval_tokens and not data_tokens:
        words.append("evaluating takes no time: how much text is held out is not known")
    return tuple(words)


def _too_short(use: BudgetUse) -> Problem:
    what = (
        f"{_time(use.budget_s)} is too short: {_time(use.start_s)} to start, {_time(use.compile_s)} to compile, "
        f"{_time(use.train_s + use.evaluation_s)} for one step and its evaluation, "
        f"{_time(use.checkpoint_s)} to save a checkpoint, {_time(use.end_s)} for samples and export"
    )
    return Problem("--budget", what, f"at least {_time(total_s(use))}")


def _time(seconds: float) -> str:
    """As it is typed, to the second, rounded up: '9h', '1h25m', '3m15s', '90s'."""
    whole = max(1, math.ceil(seconds))
    if whole < 100:
        return f"{whole}s"
    parts = zip((whole // 3600, whole // 60 % 60, whole % 60), "hms", strict=True)
    return "".join(f"{count}{unit}" for count, unit in parts if count)
