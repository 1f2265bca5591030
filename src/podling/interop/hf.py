"""Hugging Face `transformers` folders: written so that AutoModelForCausalLM and AutoTokenizer load them, and read."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import save_file

from podling.config import ModelConfig
from podling.data.tokenizer import Tokenizer
from podling.errors import InputError, Problem, RunError
from podling.files import read_json, share_like_others, sync_folder, writing
from podling.interop.compare import own_logits, transformers_logits
from podling.interop.hf_config import hf_config, model_config
from podling.interop.names import PREFIX, from_hf, to_hf
from podling.interop.weights import SINGLE, Weights, metadata, sort_metadata
from podling.model.spec import Params

MARK = {"format": "pt", "producer": "podling"}  # transformers asks for the first; by the second we know our own
LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Export:
    """What was written, and how well it reads back."""

    folder: Path
    logits_difference: float
    """Largest absolute difference between the model's logits and those of what podling read back."""
    transformers_difference: float | None
    """The same for what transformers loads; None when it was not asked or is not installed."""


@dataclass(frozen=True)
class Imported:
    """A model out of a Hugging Face folder."""

    params: Params
    """float32 NumPy arrays."""
    config: ModelConfig
    tokenizer: str | None
    """Path that the tokenizer can be read from, when the folder has one."""
    notes: list[str]
    """What a person should know, one line each."""


def export_hf(
    params: Params, cfg: ModelConfig, tokenizer: Tokenizer, folder: Path, *, with_transformers: bool = False
) -> Export:
    """Write the folder whole or not at all, after reading it back and comparing logits.

    Args:
        params: float32, of any placement.
        cfg: the model.
        tokenizer: saved beside it.
        folder: new, empty, or an earlier export, which is replaced.
        with_transformers: load it with transformers too, when that is installed (takes seconds).

    Raises:
        InputError: the folder holds something else, or lies below a file.
        RunError: no space, or what was written does not read back as the same model.
    """
    folder = Path(folder)
    _refuse_foreign(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process
        partial.mkdir(parents=True)
    try:
        with writing(folder):
            _write(partial, to_hf(params, cfg), cfg, tokenizer)
        difference, peer_difference = _read_back(partial, params, cfg, tokenizer, with_transformers)
        with writing(folder):
            _swap(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Export(folder, difference, peer_difference)


def import_hf(folder: Path) -> Imported:
    """Read a GPT-2: config.json, safetensors in either key style, and where its tokenizer is.

    Raises:
        InputError: what is missing, broken, or a variant that podling does not implement, all of it named.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(Problem(str(folder), "is not a folder", "give the folder of a Hugging Face GPT-2"))
    if not (folder / "config.json").is_file():
        raise InputError(Problem(str(folder), "holds no config.json", "give the folder of a Hugging Face GPT-2"))
    found = read_json(folder / "config.json")
    cfg, problems = model_config(found, str(folder / "config.json"))
    if cfg is None:
        raise InputError(problems)
    weights = Weights(folder)
    weights.check(cfg, folder)
    notes = [f"{dtype} weights are kept as float32" for dtype in weights.dtypes() if dtype != "float32"]
    rates = {found.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if rates != {0.0}:
        shown = ", ".join(str(rate) for rate in sorted(rates))
        notes.append(f"dropout ({shown} in its config.json) concerns training only: it starts at 0 here")
    return Imported(from_hf(weights, cfg), cfg, _tokenizer_path(folder), notes)


def _tokenizer_path(folder: Path) -> str | None:
    if (folder / "tokenizer.json").is_file():
        return str(folder / "tokenizer.json")
    return str(folder) if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() else None


def _write(folder: Path, tensors: dict[str, np.ndarray], cfg: ModelConfig, tokenizer: Tokenizer) -> None:
    eot = tokenizer.eot_id
    try:
        save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / SINGLE, metadata=MARK)
        sort_metadata(folder / SINGLE)
        share_like_others(folder / SINGLE)
    except SafetensorError as error:
        fix = "free some space, or raise the file-size limit, then repeat"
        raise RunError(Problem(str(folder / SINGLE), f"cannot be written: {error}", fix)) from error
    _write_json(folder / "config.json", hf_config(cfg, eot))
    _write_json(folder / "generation_config.json", {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot})
    tokenizer.save(folder / "tokenizer.json")
    word = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(eot)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": word,
            "eos_token": word,
            "model_max_length": cfg.context,
            "clean_up_tokenization_spaces": False,
        },
    )
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    sync_folder(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_back(
    folder: Path, params: Params, cfg: ModelConfig, tokenizer: Tokenizer, with_transformers: bool
) -> tuple[float, float | None]:
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, min(cfg.context, 64))).astype(np.int32)
    want = own_logits(params, cfg, ids)
    again = import_hf(folder)
    difference = float(np.abs(own_logits(again.params, again.config, ids) - want).max())
    peer = transformers_logits(folder, ids) if with_transformers else None
    peer_difference = None if peer is None else float(np.abs(peer - want).max())
    scale = max(1.0, float(np.abs(want).max()))
    same_words = Tokenizer.load(folder / "tokenizer.json").fingerprint == tokenizer.fingerprint
    for name, found in (("podling", difference), ("transformers", peer_difference)):
        # NaN compares false, so it is caught here too.
        if found is not None and not found <= LOGITS_TOLERANCE * scale:
            what = f"{name} reads the export back with logits {found:.2g} away from the model's"
            raise RunError(Problem(str(folder), what, "this is a bug in podling: please report it"))
    if not same_words:
        raise RunError(Problem(str(folder), "the tokenizer does not read back as it was", "please report this bug"))
    return difference, peer_difference


def _refuse_foreign(folder: Path) -> None:
    """An export replaces an export or an empty folder, nothing else."""
    if folder.is_dir():
        inside = sorted(path.name for path in folder.iterdir())
        if inside and metadata(folder / SINGLE).get("producer") != MARK["producer"]:
            shown = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
            what = f"is not empty and not an export of podling ({shown})"
            raise InputError(Problem(str(folder), what, "choose a new folder"))
    elif folder.exists():
        raise InputError(Problem(str(folder), "is a file", "choose a new folder"))


def _swap(partial: Path, folder: Path) -> None:
    """Put the new folder in place; a crash leaves the old one, the new one, or the old one under a hidden name."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.absolute().parent)
    shutil.rmtree(old, ignore_errors=True)
