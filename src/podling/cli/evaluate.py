"""`podling evaluate`."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from podling.cli.documents import document_table, out_file_problems, write_documents
from podling.cli.options import Device, Dtype, JsonFlag, data_problems, open_run
from podling.cli.parse import Parsed, parse
from podling.cli.platform import choose_platform
from podling.config import Config, DataConfig
from podling.data.prepare import is_prepared, prepare
from podling.errors import InputError, Problem, raise_if
from podling.files import counted, read_json
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
    per_example: Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")] = False
    """Score every document by itself, with the norm of its gradient; most surprising (bits per byte) first.
    The order counts the end-of-text as one byte, the figures do not.
    Very short texts come early by nature: few bytes bear the cost of their end-of-text."""
    top: int = 20
    """With --per-example: how many documents to print. --json and --out have all of them."""
    out: Annotated[str, arg(metavar="FILE", help_behavior_hint="")] = ""
    """With --per-example: a new file for all documents, .jsonl or .csv."""
    device: Device = "auto"
    """Device to use; asking for one that is not there is an error."""
    dtype: Dtype = "float32"
    """Compute precision."""
    json: JsonFlag = False
    """Print the figures as one JSON object on stdout, and everything else on stderr."""


DESCRIPTION = """Measure a model: nats per token, perplexity, and bits per byte, which compare across tokenizers.

The checkpoint with the best held-out loss is measured. Without --data it is scored on the run's own held-out windows, \
so the figure is the one in its summary. With --per-example each document is scored by itself: find the odd ones in a \
text before training on it, or see what a model has not learned.

examples:
  podling evaluate runs/default
  podling evaluate runs/book --data another_book.txt
  podling evaluate runs/gpt2 --data corpus/ --limit 10MB --json
  podling evaluate runs/gpt2 --per-example --data corpus/ --out documents.csv"""


def main(argv: list[str]) -> dict[str, Any]:
    """Evaluate and return the figures."""
    parsed = parse(Args, argv, prog="podling evaluate", description=DESCRIPTION)
    args, (config, data) = parsed.args, _checked(parsed)
    from podling.train.progress import make_reporter

    reporter = make_reporter(0, json=args.json)
    try:
        with reporter.preparing() as progress:
            prepared = prepare(data, None, progress, whole=bool(args.data))
        choose_platform(args.device)
        scored = _Scored.open(args, config, prepared, reporter)
        answer = _documents(args, scored, reporter) if args.per_example else _figures(args, scored, reporter)
    finally:
        reporter.close()
    if args.per_example:
        print(document_table(answer["documents"], args.top))
        whole = f"{counted(len(answer['documents']), 'document')}, {answer['tokens']:,} tokens"
        print(f"{whole}: {answer['nats_per_token']:.4f} nats per token, {answer['bits_per_byte']:.4f} bits per byte")
    else:
        print(f"{answer['val_loss']:.4f} nats per token, perplexity {answer['val_perplexity']:.2f}")
        bits = answer["val_bits_per_byte"]
        print("no bits per byte: only the end of text was scored" if math.isnan(bits) else f"{bits:.4f} bits per byte")
    return answer


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
    problems += _flag_problems(args, parsed.given)
    given = DataConfig(
        paths=args.data,
        tokenizer=str(paths.tokenizer),
        text_field=args.text_field,
        errors=args.errors,
        split_on_eot=args.split_on_eot,
        limit=args.limit,
        cache=config.data.cache,
    )
    if len(args.data) == 1 and is_prepared(args.data[0]):
        given = DataConfig(paths=args.data)
    data = given if args.data else config.data
    problems += validate(replace(config, data=data), ("data",))
    # Without a run there is no tokenizer either, which has been said.
    raise_if(problems + (data_problems(data, everything=False) if paths.tokenizer.exists() else []))
    return config, data


def _flag_problems(args: Args, given: frozenset[str]) -> list[Problem]:
    """Flags that would do nothing, or cannot be done."""
    problems = []
    for flag in ("--text-field", "--errors", "--split-on-eot", "--no-split-on-eot", "--limit"):
        if flag in given and not args.data:
            problems.append(Problem(flag, "says how --data is read", "give --data PATH, or leave it out"))
    for flag in ("--top", "--out"):
        if flag in given and not args.per_example:
            problems.append(Problem(flag, "is about single documents", "add --per-example, or leave it out"))
    if args.top < 1:
        problems.append(Problem("--top", f"{args.top} is less than 1"))
    return problems + out_file_problems(args.out)


@dataclass(frozen=True)
class _Scored:
    """What is scored, and by what."""

    config: Config
    prepared: Any
    model: Any
    devices: Any
    dtype: Any
    splits: Any

    @classmethod
    def open(cls, args: Args, config: Config, folder: Path, reporter: Any) -> "_Scored":
        """Read text and model, and say what they are.

        Raises:
            InputError: the text is not what the run was trained on, or of another tokenizer; no such device.
        """
        from podling.data.shards import SPLITS, Prepared
        from podling.generate.model import load_model
        from podling.parallel.device import compute_dtype, select_devices

        prepared = Prepared.open(folder, verify=True)
        if not args.data and prepared.fingerprint != read_json(open_run(args.run)[1].facts)["fingerprints"]["data"]:
            what = "the text of this run is no longer what it was trained on"
            raise InputError(Problem(args.run, what, "bring it back, or score other text with --data PATH"))
        devices = select_devices(args.device)
        dtype = compute_dtype(args.dtype, devices[0].platform)
        model = load_model(Path(args.run), reporter.say)
        if prepared.tokenizer.fingerprint != model.tokenizer.fingerprint:
            what = "its tokens are of another tokenizer than the run's"
            raise InputError(Problem(str(folder), what, "give the text itself with --data PATH"))
        if not args.data:
            reporter.say(prepared.summary())
            return cls(config, prepared, model, devices, dtype, ("heldout",))
        reporter.say("\n".join([prepared.summary().split("\n")[0], *prepared.manifest["notes"], "scoring all of it"]))
        splits = tuple(name for name in SPLITS if len(prepared.tokens(name)))
        if not args.per_example and any(len(prepared.tokens(name)) == 1 for name in SPLITS):
            what = "comes to a single token, and the first one follows nothing that could predict it"
            raise InputError(Problem(" ".join(args.data), what, "give more text, or add --per-example"))
        return cls(config, prepared, model, devices, dtype, splits)


def _figures(args: Args, scored: _Scored, reporter: Any) -> dict[str, Any]:
    """One loss over all windows."""
    import jax

    from podling.data.batches import heldout_windows
    from podling.model.form import Form
    from podling.model.spec import abstract_params
    from podling.parallel.mesh import data_parallel, make_mesh
    from podling.train.evaluate import EvalResult, Evaluator
    from podling.tuning import settled

    config, mesh = scored.config, make_mesh("auto", scored.devices)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(config.model, mesh))
    params = jax.device_put(scored.model.params, shardings)
    context, limit = config.model.context, 0 if args.data else config.train.eval_tokens
    rows = data_parallel(mesh) * max(1, 4096 // context)
    # What the run was trained with says nothing about the device that it is evaluated on.
    here = replace(config, train=replace(config.train, attention="auto", dtype=scored.dtype.name))
    form = Form.of(settled(here, scored.devices[0].platform, scored.devices[0].device_kind).train)
    results = []
    with jax.set_mesh(mesh), reporter.status("evaluating") as tell:
        for split in scored.splits:
            windows = heldout_windows(scored.prepared, context, limit, split)
            evaluator = Evaluator(config.model, windows, mesh, rows=rows, dtype=scored.dtype, form=form)
            results.append(evaluator(params, tell))
    total = EvalResult(
        nll_sum=sum(result.nll_sum for result in results),
        tokens=sum(result.tokens for result in results),
        bytes=sum(result.bytes for result in results),
    )
    return {"run": args.run, "step": scored.model.step, "data": list(args.data), **total.record()}


def _documents(args: Args, scored: _Scored, reporter: Any) -> dict[str, Any]:
    """Every document, the most surprising first."""
    from podling.train.document_scores import score_documents

    with reporter.status("scoring documents") as tell:
        scores = score_documents(
            scored.model.params,
            scored.config,
            scored.prepared,
            scored.splits,
            devices=scored.devices,
            dtype=scored.dtype,
            tell=tell,
        )
    records = sorted((score.record() for score in scores), key=_surprise, reverse=True)
    if args.out:
        write_documents(args.out, records)
        reporter.say(f"{args.out}: {counted(len(records), 'document')}")
    tokens, bytes_ = sum(score.tokens for score in scores), sum(score.bytes for score in scores)
    nll_sum = sum(score.nll_sum for score in scores)
    return {
        "run": args.run,
        "step": scored.model.step,
        "data": list(args.data),
        "tokens": tokens,
        "nats_per_token": nll_sum / tokens,
        "bits_per_byte": nll_sum / math.log(2) / bytes_ if bytes_ else math.nan,
        "documents": records,
    }


def _surprise(record: dict[str, Any]) -> float:
    """Bits per byte: odd text falls into many small tokens, each of them cheap, and is only dear for its length.

    The end-of-text is scored too and counts as a byte here, or one character and it would come before everything.
    A loss that is not a number is the greatest surprise of all; a document without text is none.
    """
    if not math.isfinite(record["nats_per_token"]):
        return math.inf
    return record["nats_per_token"] * record["tokens"] / (record["bytes"] + 1) if record["bytes"] else -math.inf
