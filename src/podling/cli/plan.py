"""`podling plan`."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, arg

from podling.cli.options import ConfigFlag, JsonFlag, base_config, data_problems, settle
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.cli.vocabulary import with_vocabulary
from podling.config import Config
from podling.errors import InputError, Problem, raise_if
from podling.files import atomic_write
from podling.model.fit import mesh_problems
from podling.parallel.axes import read_mesh, slices_problem
from podling.plan.target import Target, parse_target
from podling.validate import out_problems, svg_problems, validate

DEFAULT = "gpt2"
"""The preset that is meant where none is named: train's own default is for a laptop."""
SCALED = ("--mesh", "--train.micro-batch")
"""What is fixed for one number of devices and cannot hold for all."""
SCALED_COMPILES = 2
"""Programs for each point of the scaling curves: there are up to twenty."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling plan`."""

    chip: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = ""
    """What to plan for: v5e-1, v5e-8, v5p-8, v6e-8, v3-8, v5e:2x4, 2xv5e-256 (two slices), h100, 8xh100, t4, cpu."""
    budget: Annotated[str, arg(metavar="TIME", help_behavior_hint="")] = ""
    """How long the session lasts: 9h, 85m, 8h30m. Tells the tokens and the loss it buys, and the steps to ask for;
    without a --model it also chooses the size that ends with the lowest loss."""
    compiles: Annotated[int, arg(metavar="N")] = 8
    """Programs to compile at most in search of the fastest layout; each takes half a minute or so."""
    search_time: Annotated[str, arg(metavar="TIME")] = "5m"
    """After this long no further program is compiled, once one fits."""
    cache: Annotated[str, arg(metavar="DIR", help_behavior_hint="")] = ""
    """Where compiled programs are kept. Nothing: $XDG_CACHE_HOME/podling/plan (~/.cache/podling/plan)."""
    scaling: Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")] = False
    """Also plan 1, 2, 4 ... 256 chips: one batch on more chips, and a batch that grows with them."""
    svg: Annotated[str, arg(metavar="FILE", help_behavior_hint="")] = ""
    """With --scaling: also write it as a picture, to a file that ends in .svg."""
    config_file: ConfigFlag = ""
    """JSON file of settings, in the form of a run's config.json; flags win over it."""
    json: JsonFlag = False
    """Print the plan as one JSON object on stdout, and everything else on stderr."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


DESCRIPTION = """Before a session is spent: what fits, how fast it will be, and what the time buys.

Compiles the very step that train would run with the chip's own compiler, without the chip (TPUs: pip install \
'podling[tpu]', Linux x86-64; GPUs and other machines: worked out without a compiler, and said so). Chooses mesh, \
micro-batch, remat and loss chunk; what you give of --mesh, --train.micro-batch, --train.remat and --train.loss-chunk \
is kept as it is. Ends with the train command to type.

examples:
  podling plan --model gpt2 --chip v5e-8 --budget 9h
  podling plan --chip v5e-1 --budget 85m --data corpus/
  podling plan --model gpt2-xl --chip v5e-256 --train.remat full
  podling plan --model gpt2 --chip v5e-8 --scaling --svg scaling.svg
  podling plan --model gpt2-medium --chip h100 --json"""


@dataclass(frozen=True)
class _Asked:
    """What the arguments came to."""

    args: Args
    config: Config
    given: frozenset[str]
    target: Target
    budget_s: float | None
    search_s: float
    data_tokens: int | None
    choose_size: bool
    notes: tuple[str, ...]


def main(argv: list[str]) -> dict[str, Any]:
    """Plan, and return the plan."""
    asked = _read(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # whatever it said: nothing here is computed on an accelerator
    choose_platform("cpu")  # what a plan computes itself is little, and an accelerator may be in use
    return _plan(asked)


def _read(argv: list[str]) -> _Asked:
    """Everything that can be said before JAX starts.

    Raises:
        InputError: with all that is wrong.
    """
    from podling.plan.budget import parse_budget
    from podling.plan.data_size import data_tokens

    base, problems = base_config(argv, DEFAULT)
    choose = not any(re.match("--(model|context|config|init)", word) for word in argv)
    default = Args(config=base)
    parsed = parse(Args, argv, prog="podling plan", description=DESCRIPTION, default=default, problems=problems)
    args, given = parsed.args, parsed.given
    config, notes, found = settle(args.config, given)
    target = _tried(found, "--chip", parse_target, args.chip) if args.chip else None
    budget_s = _tried(found, "--budget", parse_budget, args.budget) if "--budget" in given else None
    search_s = _tried(found, "--search-time", parse_budget, args.search_time)
    found += _flag_problems(args, given, target, choose) + validate(_of_any_length(config, given))
    found += data_problems(config.data, everything=False)
    tokens = None
    if target is not None and not found and not parsed.problems:
        config, more, found = with_vocabulary(config, as_train=True)
        if not choose and "--mesh" in _held(config, given):
            sizes = read_mesh(config.run.mesh)[0]
            found += mesh_problems(config, sizes, target.devices)
            found += slices_problem(sizes, target.slices) if target.platform == "tpu" else []
        tokens, words = _tried(found, "", data_tokens, config.data) or (None, "")
        notes += more + ([words] if words else [])
        if not choose and not {"--model", "--init"} & given and config.model.preset == DEFAULT:
            notes.append(f"no --model is given: planned from {DEFAULT}, with what is given changed in it")
    named = {problem.where for problem in parsed.problems}
    raise_if(parsed.problems + [problem for problem in found if problem.where not in named])
    assert target is not None and search_s is not None
    return _Asked(args, config, _held(config, given), target, budget_s, search_s, tokens, choose, tuple(notes))


def _of_any_length(config: Config, given: frozenset[str]) -> Config:
    """A budget decides the steps, so a warm-up is judged when it is spent, and not by the preset's steps."""
    steps = max(config.train.steps, config.optimizer.warmup_steps)
    longer = replace(config, train=replace(config.train, steps=steps, tokens=0))
    return longer if "--budget" in given else config


def _tried(problems: list[Problem], where: str, read: Callable[[Any], Any], value: Any) -> Any:
    """What `read` makes of a value; None where it is refused, with the problems added, as those of one flag."""
    try:
        return read(value)
    except InputError as error:
        problems += [replace(problem, where=where or problem.where) for problem in error.problems]
        return None


def _held(config: Config, given: frozenset[str]) -> frozenset[str]:
    """The flags given, without those whose value says that podling chooses."""
    free = {"--mesh"} if config.run.mesh == "auto" else set()
    return given - free - ({"--train.micro-batch"} if config.train.micro_batch == 0 else set())


def _flag_problems(args: Args, given: frozenset[str], target: Target | None, choose: bool) -> list[Problem]:
    """What is wrong with the command's own flags, alone and together."""
    problems: list[Problem] = []

    def wrong(where: str, what: str, fix: str = "") -> None:
        problems.append(Problem(where, what, fix))

    if not args.chip:
        fix = "--chip v5e-8 (Kaggle's free TPU), v5e-1 (Colab's), h100, cpu ..."
        wrong("--chip", "nothing says what to plan for", fix)
    if choose and "--budget" not in given:
        fix = "give --model gpt2, or a --budget such as 9h to have the size chosen"
        wrong("--model", "nothing says which model to plan for", fix)
    if args.compiles < 1:
        wrong("--compiles", f"{args.compiles} is less than 1", "one program at least must be compiled")
    for flag in sorted({"--steps", "--tokens"} & given):
        if "--budget" in given:
            wrong(flag, "cannot go together with --budget, which decides how many there are", "give one of them")
    device = args.config.run.device
    if target is not None and device not in ("auto", target.platform):
        wrong("--device", f"{device} is not what {args.chip} is", f"leave it out, or --device {target.platform}")
    if "--cache" in given:
        problems += out_problems(args.cache, "--cache") if args.cache else [Problem("--cache", "is empty")]
    return problems + _scaling_problems(args, given, target)


def _scaling_problems(args: Args, given: frozenset[str], target: Target | None) -> list[Problem]:
    problems: list[Problem] = []
    if args.scaling:
        for flag in sorted(_held(args.config, given) & set(SCALED)):
            problems.append(Problem(flag, "holds for one number of devices, and --scaling plans many", "leave one out"))
        if target is not None and target.platform == "cpu":
            what = "the devices of a CPU share its cores and memory: more of them are no faster"
            problems.append(Problem("--scaling", what, "give a TPU or a GPU as --chip"))
    if "--svg" in given:
        problems += svg_problems(args.svg)
        if not args.scaling:
            problems.append(Problem("--svg", "is the picture of --scaling, which is not given", "add --scaling"))
    return problems


def _plan(asked: _Asked) -> dict[str, Any]:
    from podling.plan.cache import default_folder
    from podling.plan.choose import choose_size
    from podling.plan.make import make_plan
    from podling.plan.record import record
    from podling.plan.search import Limits
    from podling.train.progress import make_reporter

    args, target = asked.args, asked.target
    limits = Limits(args.compiles, asked.search_s, Path(args.cache) if args.cache else default_folder())
    reporter = make_reporter(0, json=args.json)
    scaling = None
    try:
        with reporter.status(f"planning for {target.text}"):
            make = choose_size if asked.choose_size else make_plan
            plan = make(asked.config, asked.given, target, asked.budget_s, asked.data_tokens, reporter.say, limits)
            if args.scaling:
                scaling = _scaled(asked, plan, limits, reporter.say)
    finally:
        reporter.close()
    plan = replace(plan, notes=(*asked.notes, *plan.notes))
    if not args.json:
        _show(plan, scaling)
    if scaling is not None and args.svg:
        from podling.plan.scaling_svg import picture

        atomic_write(args.svg, picture(scaling))
        print(f"{args.svg}: written")
    return {**record(plan), "scaling": scaling.record() if scaling else None, "svg": args.svg}


def _scaled(asked: _Asked, plan: Any, limits: Any, say: Callable[[str], None]) -> Any:
    """The plan's model on every size of its chip; the plan itself is one of the points."""
    from podling.plan.make import make_plan
    from podling.plan.record import model_name
    from podling.plan.scaling import scale

    config = replace(plan.config, run=replace(plan.config.run, mesh="auto"))
    config = replace(config, train=replace(config.train, micro_batch=0))
    fewer = replace(limits, compiles=min(SCALED_COMPILES, limits.compiles))

    def plan_of(other: Config, target: Target) -> Any:
        if (other, target.name) == (config, asked.target.name):
            return plan
        return make_plan(other, asked.given, target, None, None, say, fewer)

    return scale(model_name(plan), config, asked.target, plan_of, say)


def _show(plan: Any, scaling: Any) -> None:
    from rich.console import Console

    from podling.plan.scaling import show_scaling
    from podling.plan.text import show

    console = Console(highlight=False)
    console.width = max(80, console.width)  # narrower, meshes and figures would be cut
    show(plan, console)
    if scaling is not None:
        show_scaling(scaling, console)
