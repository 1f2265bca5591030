"""`podling prepare`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from podling.cli.options import ConfigFlag, JsonFlag, base_config, contradictions, data_problems
from podling.cli.parse import parse
from podling.config import DataConfig
from podling.data.prepare import prepare
from podling.errors import raise_if
from podling.presets import PRESETS, unknown_preset
from podling.validate import out_problems, validate


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling prepare`."""

    out: Annotated[str, arg(metavar="DIR", help_behavior_hint="")] = ""
    """Folder for the shards. Nothing: the cache, where `podling train` with the same flags finds them."""
    model: Annotated[str, arg(metavar="PRESET")] = "gpt2-micro"
    """Preset whose tokenizer settings to start from; give the one you will train."""
    config_file: ConfigFlag = ""
    """JSON file of settings, in the form of a run's config.json; flags win over it."""
    json: JsonFlag = False
    """Print the result as one JSON object on stdout, and everything else on stderr."""
    data: DataConfig = field(default_factory=DataConfig)


DESCRIPTION = """Turn text into token shards, so that no device waits for it.

Trains the tokenizer where it is to be trained, tokenizes on all cores in bounded memory, and writes memory-mapped \
shards. What is already there for the same text and settings is reused; after an interruption it carries on.

examples:
  podling prepare --data corpus/ --model gpt2
  podling prepare --data hf:owner/name --limit 10GB --out prepared
  podling train --data prepared --model gpt2"""


def main(argv: list[str]) -> dict[str, Any]:
    """Prepare data and return what was written."""
    base, problems = base_config(argv)
    default = Args(model=base.model.preset, data=base.data)
    parsed = parse(Args, argv, prog="podling prepare", description=DESCRIPTION, default=default, problems=problems)
    args = parsed.args
    config = replace(base, data=args.data)
    if args.model not in PRESETS:
        parsed.problems.append(unknown_preset(args.model))
    named = {problem.where for problem in parsed.problems}
    found = [*contradictions(config, parsed.given), *validate(config, ("data",))]
    found += out_problems(args.out) if args.out else []
    found += data_problems(args.data, everything=not parsed.problems and not found)
    raise_if(parsed.problems + [problem for problem in found if problem.where not in named])
    return _prepare(args)


def _prepare(args: Args) -> dict[str, Any]:
    from podling.data.shards import Prepared
    from podling.train.progress import make_reporter

    reporter = make_reporter(0, json=args.json)
    try:
        with reporter.preparing() as progress:
            folder = prepare(args.data, Path(args.out) if args.out else None, progress)
        prepared = Prepared.open(folder)
        reporter.say(prepared.summary())
        # Without --out the content names the folder, and train finds it by the same flags.
        again = f"podling train --data {folder}" if args.out else "podling train with the same flags"
        reporter.say(f"{folder}: ready for {again}")
    finally:
        reporter.close()
    splits = prepared.manifest["splits"]
    return {
        "out": str(folder),
        "fingerprint": prepared.fingerprint,
        "documents": prepared.manifest["documents"],
        "tokenizer": prepared.tokenizer.name,
        "vocab_size": prepared.tokenizer.vocab_size,
        **{f"{split}_tokens": splits[split]["tokens"] for split in splits},
        **{f"{split}_bytes": splits[split]["text_bytes"] for split in splits},
        "notes": prepared.manifest["notes"],
    }
