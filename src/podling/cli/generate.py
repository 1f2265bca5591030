"""`podling generate`."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from podling.cli.options import Device, Dtype, JsonFlag, open_run
from podling.cli.parse import parse
from podling.cli.platform import choose_platform
from podling.errors import InputError, Problem, raise_if
from podling.generate.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling generate`."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Run folder, finished or not, or an imported model."""
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT [TEXT ...]", help_behavior_hint="")] = ()
    """Texts to continue; "" starts a new one. Nothing: what comes on stdin."""
    samples: int = 1
    """Continuations of each prompt, each with a seed of its own."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)
    device: Device = "auto"
    """Device to use; asking for one that is not there is an error."""
    dtype: Dtype = "float32"
    """Compute precision; float32 equals what evaluation sees."""
    json: JsonFlag = False
    """Print prompts, texts and speed as one JSON object on stdout, and everything else on stderr."""


DESCRIPTION = """Continue texts with a trained model, as it comes.

The checkpoint with the best held-out loss is used. The same seed gives the same text on the same device.

examples:
  podling generate runs/default --prompt "def "
  podling generate runs/book --prompt "Once upon a time" --temperature 0.8
  podling generate runs/book --prompt "Chapter 1" "Chapter 2" --samples 3
  cat beginning.txt | podling generate runs/book --max-tokens 500"""


def main(argv: list[str]) -> dict[str, Any]:
    """Generate, printing text as it comes, and return everything."""
    parsed = parse(Args, argv, prog="podling generate", description=DESCRIPTION)
    args, problems = parsed.args, parsed.problems + parsed.args.settings.problems()
    if args.samples < 1:
        problems.append(Problem("--samples", f"{args.samples} is less than 1"))
    try:
        open_run(args.run)
    except InputError as error:
        problems += error.problems
    if not args.prompt and sys.stdin.isatty():
        problems.append(
            Problem("--prompt", "there is nothing to continue", 'give --prompt TEXT ("" starts a new text)')
        )
    for number, prompt in enumerate(args.prompt, start=1):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            problems.append(Problem("--prompt", f"text {number} is not UTF-8 at character {error.start}"))
    raise_if(problems)
    prompts = list(args.prompt) or [_stdin()]
    return _generate(args, [prompt for prompt in prompts for _ in range(args.samples)])


def _stdin() -> str:
    """What comes on stdin.

    Raises:
        InputError: it is not UTF-8, with the offset.
    """
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 at byte {error.start} (0x{data[error.start]:02x})"
        raise InputError(Problem("stdin", what, "convert it, for example with iconv -t UTF-8")) from error


def _generate(args: Args, prompts: list[str]) -> dict[str, Any]:
    choose_platform(args.device)
    from podling.generate.model import load_model
    from podling.generate.text import generate_text
    from podling.parallel.device import compute_dtype, select_devices

    platform = select_devices(args.device)[0].platform
    model = load_model(Path(args.run), lambda text: print(text, file=sys.stderr))
    events = generate_text(model, prompts, args.settings, dtype=compute_dtype(args.dtype, platform))
    generation = _shown(events, prompts)
    print(_ending(generation, model.config.model.context), file=sys.stderr)
    return {
        "run": args.run,
        "step": model.step,
        "completions": [asdict(completion) for completion in generation.completions],
        "tokens_per_s": generation.tokens_per_s,
    }


def _ending(generation: Any, context: int) -> str:
    """Why the texts ended where they did, and how fast they came."""
    words: dict[str, str] = {
        "end_of_text": "end of text",
        "stop": "stop string",
        "context_full": f"context of {context} full",
    }
    reasons: Counter[str] = Counter(
        words.get(str(done.finish_reason), str(done.finish_reason)) for done in generation.completions
    )
    told = ", ".join(f"{reason} ({times})" if len(reasons) > 1 else reason for reason, times in reasons.items())
    rate = f"; {generation.tokens_per_s:,.0f} tokens/s" if generation.tokens_per_s is not None else ""
    return f"stopped: {told}{rate}"


def _shown(events: Iterator[Any], prompts: list[str]) -> Any:
    """Print the text: one prompt's as it comes, several one after the other under headings."""
    from podling.generate.text import Generation

    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    for event in events:
        if isinstance(event, Generation):
            if len(prompts) == 1:
                print()
            else:
                for index, completion in enumerate(event.completions):
                    print(f"--- {index + 1} of {len(prompts)} ---\n{completion.prompt}{completion.text}")
            return event
        if len(prompts) == 1:
            print(event.text, end="", flush=True)
    raise AssertionError("the last event is a Generation")
