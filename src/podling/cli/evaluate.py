"""`podling evaluate`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from podling.cli.options import Device, Dtype, JsonFlag, open_run
from podling.cli.parse import Parsed, parse
from podling.cli.platform import choose_platform
from podling.config import Config, DataConfig
from podling.data.prepare import is_prepared, prepare
from podling.errors import InputError, Problem, raise_if
from podling.files import read_json
from podling.run.folder import RunPaths
from podling.validate import validate


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling evaluate`."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Run folder, finished or not, or an imported model."""
    data: Annotated[tuple[str, ...], arg(metavar="PATH [PATH ...]", help_behavior_hint="")] = ()
    """Text to score, all of it: what --data of train takes. Nothing: the text that the run held out."""
    text_field: str = "text"
    """Field or column that holds the text in .jsonl, .parquet and hub datasets."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: stop and say where, or replace with U+FFFD and count."""
    split_on_eot: bool = False
    """Treat a line holding only <|endoftext|> as a document boundary in plain text files."""
    limit: Annotated[str, arg(help_behavior_hint="")] = ""
    """Stop reading after this much text, e.g. 10GB. Nothing: read everything."""
    device: Device = "auto"
    """Device to use; asking for one that is not there is an error."""
    dtype: Dtype = "float32"
    """Compute precision."""
    json: JsonFlag = False
    """Print the figures as one JSON object on stdout, and everything else on stderr."""


DESCRIPTION = """Measure a model: nats per token, perplexity, and bits per byte, which compare across tokenizers.

The checkpoint with the best held-out loss is measured. Without --data it is scored on the run's own held-out windows, \
so the figure is the one in its summary.

examples:
  podling evaluate runs/default
  podling evaluate runs/book --data another_book.txt
  podling evaluate runs/gpt2 --data corpus/ --limit 10MB --json"""


def main(argv: list[str]) -> dict[str, Any]:
    """Evaluate and return the figures."""
    parsed = parse(Args, argv, prog="podling evaluate", description=DESCRIPTION)
    args, (config, data) = parsed.args, _checked(parsed)
    from podling.train.progress import make_reporter

    reporter = make_reporter(0, json=args.json)
    try:
        with reporter.preparing() as progress:
            prepared = prepare(data, None, progress)
        choose_platform(args.device)
        figures = _evaluate(args, config, prepared, reporter)
    finally:
        reporter.close()
    print(f"{figures['val_loss']:.4f} nats per token, perplexity {figures['val_perplexity']:.2f}")
    print(f"{figures['val_bits_per_byte']:.4f} bits per byte" if figures["val_bits_per_byte"] else "")
    return figures


def _checked(parsed: Parsed[Args]) -> tuple[Config, DataConfig]:
    """The run's configuration and the data to score, or every problem with them."""
    args, problems = parsed.args, list(parsed.problems)
    config, paths = Config(), RunPaths(Path(args.run))
    try:
        config, paths = open_run(args.run)
    except InputError as error:
        problems += error.problems
    if not args.data and not problems and "data" not in read_json(paths.facts)["fingerprints"]:
        problems.append(Problem("--data", "an imported model has no held-out text of its own", "give --data PATH"))
    given = DataConfig(
        paths=args.data,
        tokenizer=str(paths.tokenizer),
        text_field=args.text_field,
        errors=args.errors,
        split_on_eot=args.split_on_eot,
        limit=args.limit,
        holdout=0.5,  # both parts are scored; this only keeps a short text from being too short to divide
        cache=config.data.cache,
    )
    if len(args.data) == 1 and is_prepared(args.data[0]):
        given = DataConfig(paths=args.data)
    data = given if args.data else config.data
    raise_if(problems + validate(replace(config, data=data), ("data",)))
    return config, data


def _evaluate(args: Args, config: Config, folder: Path, reporter: Any) -> dict[str, Any]:
    import jax

    from podling.data.batches import heldout_windows
    from podling.data.shards import Prepared
    from podling.generate.model import load_model
    from podling.model.spec import abstract_params
    from podling.parallel.device import compute_dtype, select_devices
    from podling.parallel.mesh import data_parallel, make_mesh
    from podling.train.evaluate import EvalResult, Evaluator

    prepared = Prepared.open(folder, verify=True)
    if not args.data and prepared.fingerprint != read_json(open_run(args.run)[1].facts)["fingerprints"]["data"]:
        what = "the text of this run is no longer what it was trained on"
        raise InputError(Problem(args.run, what, "bring it back, or score other text with --data PATH"))
    devices = select_devices(args.device)
    mesh = make_mesh("auto", devices)
    dtype = compute_dtype(args.dtype, devices[0].platform)
    model = load_model(Path(args.run), reporter.say)
    if prepared.tokenizer.fingerprint != model.tokenizer.fingerprint:
        what = "its tokens are of another tokenizer than the run's"
        raise InputError(Problem(str(folder), what, "give the text itself with --data PATH"))
    if args.data:
        reporter.say("\n".join([prepared.summary().split("\n")[0], *prepared.manifest["notes"], "scoring all of it"]))
    else:
        reporter.say(prepared.summary())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(config.model, mesh))
    params = jax.device_put(model.params, shardings)
    context, limit = config.model.context, 0 if args.data else config.train.eval_tokens
    rows = data_parallel(mesh) * max(1, 4096 // context)
    results = []
    with jax.set_mesh(mesh), reporter.status("evaluating") as tell:
        for split in ("train", "heldout") if args.data else ("heldout",):
            windows = heldout_windows(prepared, context, limit, split)
            evaluator = Evaluator(
                config.model, windows, mesh, rows=rows, dtype=dtype, loss_chunk=config.train.loss_chunk
            )
            results.append(evaluator(params, tell))
    total = EvalResult(
        nll_sum=sum(result.nll_sum for result in results),
        tokens=sum(result.tokens for result in results),
        bytes=sum(result.bytes for result in results),
    )
    return {"run": args.run, "step": model.step, "data": list(args.data), **total.record()}
