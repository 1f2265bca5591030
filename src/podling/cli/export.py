"""`podling export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from podling.cli.options import JsonFlag, open_run
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.errors import InputError, raise_if
from podling.validate import out_problems


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling export`."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Run folder, finished or not, or an imported model."""
    folder: Annotated[Positional[str], arg(metavar="DIR")]
    """Folder to write: new, empty, or an earlier export."""
    to: Literal["hf"] = "hf"
    """Form to write: hf is a folder that transformers loads (safetensors, config, tokenizer)."""
    json: JsonFlag = False
    """Print the result as one JSON object on stdout, and everything else on stderr."""


DESCRIPTION = """Write a model in the form of other programs.

The checkpoint with the best held-out loss is exported, whole or not at all. What was written is read back, by podling \
and by transformers where that is installed, and its logits are compared with the model's.

examples:
  podling export runs/default --to hf exported/
  python -c "from transformers import pipeline; print(pipeline('text-generation', 'exported/')('def '))\""""


def main(argv: list[str]) -> dict[str, Any]:
    """Export and return what was written."""
    parsed = parse(Args, argv, prog="podling export", description=DESCRIPTION)
    args, problems = parsed.args, parsed.problems + out_problems(parsed.args.folder, where="DIR")
    try:
        open_run(args.run)
    except InputError as error:
        problems += error.problems
    raise_if(problems)
    choose_platform("cpu")  # an accelerator has nothing to do here, and may be in use
    from podling.generate.model import load_model
    from podling.interop.hf import export_hf

    model = load_model(Path(args.run), print)
    export = export_hf(model.params, model.config.model, model.tokenizer, Path(args.folder), with_transformers=True)
    print(f"{export.folder}: logits read back within {export.logits_difference:.1e} of the model's")
    if export.transformers_difference is None:
        print("transformers is not installed here, so it was not asked to load it")
    else:
        print(f"transformers loads it, with logits within {export.transformers_difference:.1e}")
    return {
        "run": args.run,
        "step": model.step,
        "export": str(export.folder),
        "logits_difference": export.logits_difference,
        "transformers_difference": export.transformers_difference,
    }
