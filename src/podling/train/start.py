"""From a configuration to a running loop: the gates that need no JAX, so that they answer at once."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from podling.config import Config
from podling.data.batches import check_length
from podling.data.prepare import prepare
from podling.data.shards import Prepared
from podling.data.tokenizer import Tokenizer
from podling.errors import InputError, Problem, raise_if
from podling.hosts.hosts import ALONE, Hosts
from podling.run.folder import RunFolder, load_run
from podling.train.progress import QuietReporter, Reporter
from podling.train.together import Together, agree_on_data, agree_on_setup, check_shared

SHAPE_FLAGS = {
    "layers": "--model.layers",
    "heads": "--model.heads",
    "embed": "--model.embed",
    "mlp": "--model.mlp",
    "context": "--context",
    "vocab_size": "--vocab-size",
}


def train(config: Config, reporter: Reporter, hosts: Hosts = ALONE) -> dict[str, Any]:
    """Train a model, or continue the run that `config.run.out` holds.

    Args:
        config: validated. A run folder of the same configuration is continued; a finished one is only summarised.
        reporter: told everything a person would want to know, in the first process.
        hosts: the processes of the run, which all call this. They share the run folder.

    Returns:
        The summary: `run, params, tokens, steps, train_loss, val_loss, val_bits_per_byte, unigram_loss, bigram_loss,
        tokens_per_s, mfu, data_wait_share, retraces, wall_s, export` and more.

    Raises:
        InputError: data, devices or run folder cannot be used as they are; in all processes when in one.
        RunError: the run could not go on; what was saved is intact.
        Interrupted: a signal to any process stopped the run after saving.
    """
    began_s = time.perf_counter()
    reporter = reporter if hosts.is_first else QuietReporter()
    together = Together(hosts)
    agree_on_setup(together, config)
    with together.gate("data"):
        config, prepared = prepare_data(config, reporter)
        if config.run.init:
            raise_if(init_problems(Path(config.run.init), config, prepared))
    agree_on_data(together, prepared, config.data.paths)
    fingerprints = {"data": prepared.fingerprint, "tokenizer": prepared.tokenizer.fingerprint}
    with _open_folder(config, fingerprints, together) as folder:
        try:
            check_shared(together, folder.path)
            summary = together.broadcast("summary of the run", folder.summary)
            if summary is not None:
                reporter.say(f"{folder.path} is finished")
                reporter.summary(summary)
                return summary
            for note in folder.notes:
                reporter.say(note)
            with together.gate("starting JAX"), reporter.status("starting JAX", 3):
                if together.is_first:
                    prepared.tokenizer.save(folder.paths.tokenizer)
                from podling.train.loop import run
            return run(config, prepared, folder, reporter, began_s, together)
        except InputError:
            folder.withdraw()
            raise


def _open_folder(config: Config, fingerprints: dict[str, str], together: Together) -> RunFolder:
    """The run folder, held by the first process for all of them."""
    out, folder = Path(config.run.out), None
    try:
        with together.gate("opening the run folder"):
            if together.is_first:
                folder = RunFolder.open(out, config, fingerprints)
            else:
                folder = RunFolder.of_first(out)
    except BaseException:
        if folder is not None:
            folder.withdraw()
            folder.close()
        raise
    return folder


def init_problems(path: Path, config: Config, prepared: Prepared) -> list[Problem]:
    """Where the model of another run is not this run's, so that its weights cannot be the beginning."""
    other, paths = load_run(path)
    problems = [
        Problem(f"--init {path}", f"{field} is {there}, this run's is {here}", f"use {flag} {there}")
        for field, flag in SHAPE_FLAGS.items()
        if (there := getattr(other.model, field)) != (here := getattr(config.model, field))
    ]
    if Tokenizer.load(paths.tokenizer).fingerprint != prepared.tokenizer.fingerprint:
        what = "its tokenizer is not this run's"
        problems.append(Problem(f"--init {path}", what, f"use --tokenizer {paths.tokenizer}"))
    return problems


def prepare_data(config: Config, reporter: Reporter) -> tuple[Config, Prepared]:
    """The data gate: tokenise (or find it done), and settle what the configuration left to the data.

    Returns:
        The configuration with `model.vocab_size` and `train.steps` known, and the prepared data.

    Raises:
        InputError: nothing to read, unreadable text, a vocabulary of another size than asked.
    """
    with reporter.preparing() as progress:
        folder = prepare(config.data, None, progress)
    with reporter.status("checking the tokens", None):
        prepared = Prepared.open(folder, verify=True)
    check_length(prepared, "train", config.model.context)
    reporter.say(f"data: {prepared.summary()}")
    vocab_size = prepared.tokenizer.vocab_size
    if config.model.vocab_size not in (0, vocab_size):
        what = f"is {config.model.vocab_size}, and the tokenizer has {vocab_size} tokens"
        raise InputError(Problem("--model.vocab-size", what, "leave it out: it is taken from the tokenizer"))
    train = config.train
    if train.tokens:
        steps = train.total_steps
        reporter.say(f"{train.tokens:,} tokens are {steps:,} steps of {train.batch_tokens:,}")
        train = dataclasses.replace(train, steps=steps, tokens=0)
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return dataclasses.replace(config, model=model, train=train), prepared
