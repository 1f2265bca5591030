"""`podling bench`."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import arg

from podling.cli.options import ConfigFlag, JsonFlag, base_config, settle
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.cli.vocabulary import with_vocabulary
from podling.config import Config
from podling.errors import Problem, raise_if
from podling.validate import validate

MOST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling bench`."""

    seconds: float = 5.0
    """Of training steps, up to 600; compiling and the other measurements come on top."""
    config_file: ConfigFlag = ""
    """JSON file of settings, in the form of a run's config.json; flags win over it."""
    json: JsonFlag = False
    """Print everything as one JSON object on stdout."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


DESCRIPTION = """How fast this machine trains, loads data and generates, and what keeps it from being faster.

It runs the very step that train runs, its batches out of shards of made-up tokens, and then generates with random \
weights; no text is read and nothing is kept. Put bench in the place of train in a command, and see. Speeds stand \
beside what was measured to be possible here: matrix products, and reading memory.

examples:
  podling bench
  podling bench --model gpt2 --context 64 --batch-tokens 256
  podling bench --config runs/default/config.json --seconds 20
  JAX_NUM_CPU_DEVICES=8 podling bench --mesh data=4,tensor=2"""


def main(argv: list[str]) -> dict[str, Any]:
    """Measure this machine, and return what was measured."""
    args, config, notes = _read(argv)
    choose_platform(config.run.device)
    from podling.measure.bench import bench
    from podling.measure.steps import resolved
    from podling.measure.text import lines
    from podling.train.progress import make_reporter

    reporter = make_reporter(0, json=args.json)
    try:
        for note in notes:
            reporter.say(note)
        found = bench(resolved(config, config.model.vocab_size), args.seconds, reporter.status)
    finally:
        reporter.close()
    if not args.json:
        print("\n".join(lines(found)))
    return {**found.record(), "notes": notes}


def _read(argv: list[str]) -> tuple[Args, Config, list[str]]:
    """The arguments, the configuration they come to, and notes.

    Raises:
        InputError: with everything that is wrong with them.
    """
    base, problems = base_config(argv)
    texts = {"prog": "podling bench", "description": DESCRIPTION}
    parsed = parse(Args, argv, **texts, default=Args(config=base), problems=problems)
    args = parsed.args
    config, notes, found = settle(args.config, parsed.given)
    found += validate(config)
    if not (math.isfinite(args.seconds) and 0 < args.seconds <= MOST_S):
        found.append(Problem("--seconds", f"{args.seconds:g} is not above 0 and up to {MOST_S:g}", "for example 5"))
    if not parsed.problems and not found:
        config, note, found = with_vocabulary(config)
        notes += note
    named = {problem.where for problem in parsed.problems}
    raise_if(parsed.problems + [problem for problem in found if problem.where not in named])
    return args, config, notes
