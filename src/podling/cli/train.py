"""`podling train`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import arg

from podling.cli.options import ConfigFlag, JsonFlag, base_config, data_problems, settle, total_steps
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.config import Config
from podling.errors import raise_if
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
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def main(argv: list[str]) -> dict[str, Any]:
    """Train, or continue a run, and return its summary."""
    base, problems = base_config(argv)
    parsed = parse(
        Args,
        argv,
        prog="podling train",
        description=_description(),
        default=Args(config=base),
        problems=problems,
    )
    config, notes, found = settle(parsed.args.config, parsed.given)
    found += validate(config)
    found += data_problems(config.data, everything=not parsed.problems and not found)
    named = {problem.where for problem in parsed.problems}
    raise_if(parsed.problems + [problem for problem in found if problem.where not in named])

    choose_platform(config.run.device)
    from podling.train.progress import make_reporter
    from podling.train.start import train

    reporter = make_reporter(total_steps(config), json=parsed.args.json, log_every=config.run.log_every)
    for note in notes:
        reporter.say(note)
    try:
        return train(config, reporter)
    finally:
        reporter.close()


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

presets (--model):
{presets}

The defaults below are those of the chosen preset: add --model to this help to see others."""
