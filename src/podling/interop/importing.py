"""`podling import`: a Hugging Face folder becomes a run folder at step 0, like any run from then on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from podling.config import Config, DataConfig, RunConfig
from podling.data.corpus import Sources
from podling.data.tokenizer import Tokenizer
from podling.data.vocabulary import build_tokenizer
from podling.errors import InputError, Problem
from podling.interop.hf import Imported, import_hf
from podling.run.checkpoint import Checkpoints, hash_state, state_bytes
from podling.run.folder import RunFolder


@dataclass(frozen=True)
class ImportedRun:
    """A run folder that holds an imported model."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    notes: list[str]
    """What a person should know, one line each."""


def import_model(folder: Path, out: Path, tokenizer: str | None, say: Callable[[str], None]) -> ImportedRun:
    """Read a GPT-2 and write it as a run.

    Args:
        folder: config.json, safetensors and, unless `tokenizer` is given, a tokenizer.
        out: the run folder; new, or one that holds this very model already.
        tokenizer: `gpt2`, `bytes`, or the path of a tokenizer.json or of a folder with vocab.json and merges.txt.
        say: told about what lies in `out` already.

    Raises:
        InputError: the model or its tokenizer cannot be used, or `out` holds something else.
        RunError: no space to write it.
    """
    model = import_hf(Path(folder))
    words = _tokenizer(model, Path(folder), tokenizer)
    source = tokenizer or model.tokenizer or ""
    config = Config(model=model.config, data=DataConfig(tokenizer=source), run=RunConfig(out=str(out)))
    notes = list(model.notes)
    if words.vocab_size < model.config.vocab_size:
        notes.append(
            f"the model has {model.config.vocab_size} ids and its tokenizer {words.vocab_size}: "
            "the others are kept, and never drawn"
        )
    params = jax.device_put(model.params, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    state: dict[str, Any] = {"params": params}
    fingerprints = {"tokenizer": words.fingerprint, "weights": hash_state(state)}
    with RunFolder.open(Path(out), config, fingerprints) as run:
        run.keep(config)
        words.save(run.paths.tokenizer)
        checkpoints = Checkpoints(run.paths.checkpoints)
        try:
            if not run.is_new and checkpoints.latest() == 0:
                say(f"{out} holds this model already")
            checkpoints.check_space(state_bytes(state))
            checkpoints.save(0, state, {"step": 0, "imported_from": str(folder)})
            checkpoints.wait()
        finally:
            checkpoints.close()
    return ImportedRun(Path(out), config, words, notes)


def _tokenizer(model: Imported, folder: Path, asked: str | None) -> Tokenizer:
    source = asked or model.tokenizer
    known = "gpt2, bytes, or the path of a tokenizer.json or of a folder with vocab.json and merges.txt"
    if source is None:
        raise InputError(Problem(str(folder), "holds no tokenizer", f"give one with --tokenizer: {known}"))
    if source in ("bpe", "char"):
        what = f"{source} is made from text, and this model has its vocabulary already"
        raise InputError(Problem("--tokenizer", what, known))
    words = build_tokenizer(replace(DataConfig(), tokenizer=source), Sources())
    if words.vocab_size > model.config.vocab_size:
        what = f"has {words.vocab_size} tokens, and the model's vocabulary is {model.config.vocab_size}"
        raise InputError(Problem(f"tokenizer {words.name}", what, "give the tokenizer the model was trained with"))
    return words
