"""`podling train`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import arg

from podling.cli.options import ConfigFlag, JsonFlag, base_config, data_problems, settle
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.config import Config
from podling.errors import raise_if
from podling.hosts.join import HostArgs, find, host_problems, quiet_gloo, together
from podling.launch.child import follow_launcher
from podling.presets import PRESETS
from podling.validate import validate


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling train`."""

    resume: Annotated[str, arg(metavar="RUN", help_behavior_hint="")] = ""
    """Continue this run where its last checkpoint left it, with its own configuration."""
    config_file: ConfigFlag = ""
    """JSON file of settings, in the form of a run's config.json; flags win over it."""
    json: JsonFlag = False
    """Print the summary as one JSON object on stdout, and everything else on stderr."""
    coordinator: Annotated[str, arg(metavar="HOST:PORT", help_behavior_hint="")] = ""
    """Where process 0 listens, for a run of several processes that no cluster has started. On a TPU pod, under SLURM,
    Kubernetes or Open MPI the processes find one another, and none of these three flags is needed."""
    num_processes: Annotated[int, arg(help_behavior_hint="")] = 0
    """How many processes the run has. 1: this one alone, whatever the cluster says."""
    process_id: Annotated[int, arg(help_behavior_hint="")] = -1
    """The number of this process, from 0."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def read(argv: list[str]) -> tuple[Args, HostArgs, Config, list[str]]:
    """The arguments, those of several processes, the configuration they come to, and notes for the person.

    Needs no JAX.

    Raises:
        InputError: with everything that is wrong with them.
    """
    base, problems = base_config(argv)
    parsed = parse(
        Args,
        argv,
        prog="podling train",
        description=_description(),
        default=Args(config=base),
        problems=problems,
    )
    hosts = HostArgs(*(value if flag in parsed.given else None for flag, value in _host_flags(parsed.args)))
    config, notes, found = settle(parsed.args.config, parsed.given)
    found += validate(config) + host_problems(hosts)
    found += data_problems(config.data, everything=not parsed.problems and not found)
    named = {problem.where for problem in parsed.problems}
    raise_if(parsed.problems + [problem for problem in found if problem.where not in named])
    return parsed.args, hosts, config, notes


def _host_flags(args: Args) -> list[tuple[str, Any]]:
    """In the order of `HostArgs`. What was typed counts, even where it is the default: `--process-id -1` is wrong."""
    return [
        ("--coordinator", args.coordinator),
        ("--num-processes", args.num_processes),
        ("--process-id", args.process_id),
    ]


def main(argv: list[str]) -> dict[str, Any]:
    """Train, or continue a run, and return its summary."""
    args, host_args, config, notes = read(argv)
    launched = follow_launcher()
    choose_platform(config.run.device)
    from podling.cli.main import Ended, end_at_once
    from podling.train.progress import make_reporter
    from podling.train.start import train

    place = find(host_args)
    if place is not None:
        quiet_gloo()
    reporter = make_reporter(config.train.total_steps, json=args.json, log_every=config.run.log_every)
    try:
        with together(place, reporter.say, beside_first=launched) as hosts:
            if hosts.member is not None:
                hosts.member.end = end_at_once
            for note in notes if hosts.is_first else []:
                reporter.say(note)
            summary = train(config, reporter, hosts)
    finally:
        reporter.close()
    if not hosts.is_first:
        raise Ended(0, None)
    return summary


def _description() -> str:
    presets = "\n".join(f"  {name:<12} {preset.about}" for name, preset in PRESETS.items())
    return f"""Train a GPT on text, evaluate it, write samples and a Hugging Face export.

With no arguments it learns from the source of the Python standard library on this machine, for a few minutes on a \
laptop; nothing is downloaded. The same command on the same --out continues a run that was stopped.

examples:
  podling train
  podling train --data book.txt --out runs/book
  podling train --data corpus/ --model gpt2 --tokens 1000000000
  podling train --resume runs/book
  JAX_NUM_CPU_DEVICES=8 podling train --mesh data=4,tensor=2
  podling train --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 0   (and 1 on the other machine)

presets (--model):
{presets}

The defaults below are those of the chosen preset: add --model to this help to see others."""
