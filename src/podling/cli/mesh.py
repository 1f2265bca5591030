"""`podling mesh`."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tyro.conf import Positional, arg

from podling.cli.options import ConfigFlag, JsonFlag, base_config, open_run, settle
from podling.cli.parse import Parsed, parse, peek
from podling.cli.platform import choose_platform
from podling.cli.vocabulary import with_vocabulary
from podling.config import Config
from podling.errors import InputError, Problem, raise_if
from podling.files import atomic_write
from podling.model.fit import mesh_problems
from podling.parallel.axes import read_mesh
from podling.validate import svg_problems, validate

MOST_DEVICES = 4096  # more take minutes, and no one reads that drawing


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling mesh`."""

    run: Annotated[Positional[str], arg(metavar="[RUN]", help_behavior_hint="")] = ""
    """A run folder, to draw its model; flags win over what it says."""
    topology: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = ""
    """TPU chips to draw: v5e:2x4, v5e-8, v6e-8, v4:2x2x1... Nothing: the devices of this machine."""
    devices: Annotated[int, arg(metavar="N", help_behavior_hint="")] = 0
    """As if this machine had that many devices like its first, up to 4096; without --topology."""
    svg: Annotated[str, arg(metavar="FILE", help_behavior_hint="")] = ""
    """Also write a picture, to a file that ends in .svg."""
    config_file: ConfigFlag = ""
    """JSON file of settings, in the form of a run's config.json; flags win over it."""
    json: JsonFlag = False
    """Print everything as one JSON object on stdout."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


DESCRIPTION = """Draw a model on a mesh: which device holds what, in shapes and bytes, and what they send one another.

Nothing is trained and no data is read: put mesh in the place of train in a command, and see. With --topology no TPU \
is needed; where its compiler is installed (pip install 'podling[tpu]', Linux x86-64), devices lie as it lays them.

examples:
  podling mesh --model gpt2-xl --topology v5e:2x4 --mesh fsdp=8
  podling mesh --model gpt2 --devices 8 --mesh data=2,fsdp=2,tensor=2
  podling mesh runs/default
  podling mesh --model gpt2-xl --topology v5e-256 --svg mesh.svg"""


def main(argv: list[str]) -> dict[str, Any]:
    """Draw a mesh, and return what was drawn."""
    parsed, config, notes = _parsed(argv)
    args, problems = parsed.args, list(parsed.problems)
    problems += validate(config, ("model", "optimizer", "train"))
    problems += [bad for bad in validate(config, ("run",)) if bad.where == "--mesh"]
    problems += _flag_problems(args, parsed.given - {problem.where for problem in parsed.problems})
    from podling.topology import parse_topology

    try:
        topology = parse_topology(args.topology) if args.topology else None
    except InputError as error:
        problems, topology = problems + error.problems, None
    if not problems:
        config, note, problems = with_vocabulary(config)
        notes += note
        problems += _mesh_problems(config, topology.devices if topology else args.devices)
    raise_if(problems)
    choose_platform("cpu" if topology else config.run.device)
    return _draw(args, config, topology, notes)


def _parsed(argv: list[str]) -> tuple[Parsed[Args], Config, list[str]]:
    """The arguments, and the configuration they mean; a run gives the defaults of the flags."""
    base, problems = base_config(argv)
    if not problems and (run := parse(Args, argv, **_texts(), default=Args(config=base)).args.run):
        try:
            model = open_run(run)[0]
            base = replace(model, model=base.model) if peek(argv, "--model") else model
        except InputError as error:
            problems = error.problems
    parsed = parse(Args, argv, **_texts(), default=Args(config=base), problems=problems)
    config, notes, found = settle(parsed.args.config, parsed.given)
    named = {problem.where for problem in parsed.problems}
    parsed.problems.extend(problem for problem in found if problem.where not in named)
    return parsed, config, notes


def _flag_problems(args: Args, given: frozenset[str]) -> list[Problem]:
    """What is wrong with the command's own flags, of those that were given and could be read."""
    problems: list[Problem] = []
    if "--topology" in given and not args.topology:
        problems.append(Problem("--topology", "is empty", "for example v5e:2x4; without it: this machine's devices"))
    if "--devices" in given:
        if args.devices < 1:
            problems.append(Problem("--devices", f"{args.devices} is less than 1", "leave it out for the real ones"))
        elif args.devices > MOST_DEVICES:
            what = f"{args.devices} is more than the {MOST_DEVICES} that podling draws"
            problems.append(Problem("--devices", what, "ask for fewer"))
        elif "--topology" in given:
            problems.append(Problem("--devices", "cannot go together with --topology", "give one of them"))
    if "--svg" in given:
        problems += svg_problems(args.svg)
    return problems


def _texts() -> dict[str, Any]:
    return {"prog": "podling mesh", "description": DESCRIPTION}


def _mesh_problems(config: Config, devices: int) -> list[Problem]:
    """What keeps model and batch from the mesh that was asked for, where the number of devices is known before JAX."""
    if not devices or config.run.mesh == "auto":
        return []
    return mesh_problems(config, read_mesh(config.run.mesh)[0], devices)


def _draw(args: Args, config: Config, topology: Any, notes: list[str]) -> dict[str, Any]:
    from podling.layout.describe import describe
    from podling.layout.grid import grid_of_count, grid_of_devices, grid_of_topology
    from podling.parallel.device import compute_dtype, select_devices
    from podling.parallel.mesh import make_mesh
    from podling.train.auto_mesh import Machine, joined, settle_mesh
    from podling.train.batch_plan import device_memory_bytes
    from podling.tuning import MICRO_TOKENS, settled

    found = [] if topology else select_devices(config.run.device)
    if topology:
        machine = Machine(topology.devices, topology.devices, topology.device_bytes)
        where, platform = f"{topology.name} ({topology.chip.device_kind})", "tpu"
        kind = topology.chip.device_kind
    else:
        like = [found[0]] * args.devices if args.devices else found
        machine = Machine(len(like), joined(like), device_memory_bytes(like))
        where, platform = f"{machine.devices} x {found[0].device_kind}", found[0].platform
        kind = found[0].device_kind
    dtype = compute_dtype(config.train.dtype, platform)
    config = settled(config, platform, kind)
    choice = settle_mesh(config, machine, dtype.itemsize)
    if topology:
        grid = grid_of_topology(topology, choice.sizes)
    elif args.devices:
        grid = grid_of_count(args.devices, choice.sizes)
    else:
        grid = grid_of_devices(make_mesh(choice.text, found))
    most_tokens = MICRO_TOKENS.get(platform)
    layout = describe(config, grid, where, choice.why, machine.device_bytes, dtype, most_tokens)
    if not args.json:
        from rich.console import Console

        from podling.layout.text import show

        console = Console()
        console.width = max(80, console.width)  # narrower, the names of the arrays would be cut
        for note in notes:
            console.print(note, highlight=False, markup=False)
        show(layout, console)
    if args.svg:
        from podling.layout.svg import picture

        atomic_write(args.svg, picture(layout))
        print(f"{args.svg}: written")
    return {**layout.record(), "notes": notes, "svg": args.svg}
