"""`podling import`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from podling.cli.options import JsonFlag
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.errors import Problem, raise_if
from podling.validate import out_problems


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling import`."""

    folder: Annotated[Positional[str], arg(metavar="DIR")]
    """Folder with config.json and safetensors, as transformers and the hub keep a GPT-2."""
    out: Annotated[str, arg(metavar="RUN")]
    """Run folder to make."""
    tokenizer: Annotated[str, arg(metavar="PATH", help_behavior_hint="")] = ""
    """gpt2, a tokenizer.json, or a folder with vocab.json and merges.txt. Nothing: the one in DIR."""
    json: JsonFlag = False
    """Print the result as one JSON object on stdout, and everything else on stderr."""


DESCRIPTION = """Make a run out of a GPT-2 in the form of Hugging Face transformers.

The run holds the model as its step 0: generate, evaluate and export take it, and train --init starts from it. A \
variant of GPT-2 that podling does not implement is refused by name.

examples:
  podling import gpt2-download/ --out runs/gpt2
  podling import weights/ --out runs/mine --tokenizer tokenizer.json
  podling train --init runs/gpt2 --model gpt2 --data book.txt --out runs/tuned"""


def main(argv: list[str]) -> dict[str, Any]:
    """Import and return what was made."""
    parsed = parse(Args, argv, prog="podling import", description=DESCRIPTION)
    args, problems = parsed.args, parsed.problems + out_problems(parsed.args.out)
    if not (Path(args.folder) / "config.json").is_file():
        what = "holds no config.json" if Path(args.folder).is_dir() else "is not a folder"
        problems.append(Problem(args.folder, what, "give the folder of a Hugging Face GPT-2"))
    raise_if(problems)
    choose_platform("cpu")
    from podling.interop.importing import import_model
    from podling.model.spec import param_count

    made = import_model(Path(args.folder), Path(args.out), args.tokenizer or None, print)
    for note in made.notes:
        print(note)
    model, params = made.config.model, param_count(made.config.model)
    print(f"{made.path}: {params:,} parameters, {model.layers} layers, {model.heads} heads, {model.embed} wide")
    print(f'next: podling generate {made.path} --prompt "..."')
    return {"run": str(made.path), "params": params, "tokenizer": made.tokenizer.name, "notes": made.notes}
