"""Making a tokenizer: training BPE on the data, collecting characters, or reading a vocabulary that exists."""

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podling.config import DataConfig
from podling.data.corpus import Sources, iter_chunks
from podling.data.cutting import Cutter
from podling.data.events import Meter, Progress
from podling.data.readers import EOT
from podling.data.tokenizer import Tokenizer
from podling.data.tokenizer_spec import byte_alphabet
from podling.errors import InputError, Problem
from podling.files import read_json, show_bytes

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import models

TRAIN_BYTES = 200_000_000
"""BPE is trained on an even sample of at most this much text: more would hardly change the vocabulary."""
DISTINCT_BYTES = 8_000_000
"""And of at most about this much in different words: the library needs 100 to 125 bytes of memory for each (measured on
English and Japanese; Japanese has few repeated words, so that 19 MB of it took 1.8 GB)."""
SAMPLE_BYTES = 4_000_000
"""Text looked at to judge how much of it is repeated."""
LONGEST_WORD = 4096
"""Longer runs without a word boundary are cut for training only; no useful token is near that long."""
GPT2_REPOSITORIES = ("openai-community/gpt2", "gpt2")
_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
VOCAB_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def build_tokenizer(
    config: DataConfig,
    sources: Sources,
    progress: Progress | None = None,
    *,
    total_bytes: int | None = None,
    train_document: Callable[[int], bool] | None = None,
) -> Tokenizer:
    """The tokenizer `config.tokenizer` asks for.

    Args:
        config: tokenizer and vocab_size.
        sources: text to train on (bpe) or to collect characters from (char).
        progress: told how far it is.
        total_bytes: bytes of text in the sources, when known; above TRAIN_BYTES bpe trains on an even sample.
        train_document: whether to train on the nth document; the held-out ones are left out.

    Raises:
        InputError: the vocabulary asked for cannot be made or found.
    """
    if config.tokenizer == "bpe":
        return _train_bpe(config, sources, Meter("training the tokenizer", total_bytes, progress), train_document)
    if config.tokenizer == "char":
        return _characters(config, sources, Meter("collecting characters", total_bytes, progress))
    return known_tokenizer(config.tokenizer)


def known_tokenizer(kind: str) -> Tokenizer:
    """The tokenizer that needs no text: bytes, gpt2, or one that a path names.

    Raises:
        InputError: it cannot be found or read.
    """
    if kind == "bytes":
        return bytes_tokenizer()
    return _gpt2() if kind == "gpt2" else from_path(kind)


def check_tokenizer(config: DataConfig) -> list[Problem]:
    """What is wrong with the tokenizer asked for, as far as can be told without reading any text."""
    if config.tokenizer == "bpe" and config.vocab_size < 257:
        what = f"{config.vocab_size} is too small: 256 bytes and end-of-text make 257"
        return [Problem("--vocab-size", what, "ask for 257 or more")]
    if config.tokenizer in ("bpe", "char", "bytes", "gpt2") or os.path.exists(config.tokenizer):
        return []
    fix = "bpe, char, bytes, gpt2, or the path of a tokenizer.json or of a folder with vocab.json and merges.txt"
    return [Problem("--tokenizer", f"{config.tokenizer!r} is neither a kind of tokenizer nor a path", fix)]


def bytes_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 is end-of-text."""
    from tokenizers import models

    vocab = {symbol: byte for byte, symbol in byte_alphabet().items()}
    return _ended(_byte_level(models.BPE(vocab=vocab, merges=[])), "bytes 257")


def from_path(path: str) -> Tokenizer:
    """Read a tokenizer.json, or a folder that holds one or GPT-2's two vocabulary files.

    Raises:
        InputError: there is no such thing, or it is broken.
    """
    if not os.path.isdir(path):
        return Tokenizer.load(path)
    folder = Path(path)
    if (folder / "tokenizer.json").exists():
        return Tokenizer.load(folder / "tokenizer.json")
    for vocab, merges in VOCAB_FILES:
        if (folder / vocab).exists() and (folder / merges).exists():
            return _from_vocab_files(folder / vocab, folder / merges)
    what = "holds no tokenizer.json, vocab.json with merges.txt, or encoder.json with vocab.bpe"
    raise InputError(Problem(path, what))


def _byte_level(model: "models.BPE") -> "tokenizers.Tokenizer":
    """GPT-2's pipeline around a model, without end-of-text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers

    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _ended(backend: "tokenizers.Tokenizer", name: str, where: str = "tokenizer.json") -> Tokenizer:
    """Add end-of-text, as the last id unless the vocabulary has it."""
    backend.add_special_tokens([EOT])
    return Tokenizer(backend, name, where)


def _train_bpe(
    config: DataConfig, sources: Sources, meter: Meter, train_document: Callable[[int], bool] | None
) -> Tokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    wanted = config.vocab_size
    if problems := check_tokenizer(config):
        raise InputError(problems)
    share = _training_share(config, sources, meter.total_bytes)
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=wanted - 1,  # pyright: ignore[reportCallIssue]
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(_training_texts(config, sources, meter, share, train_document), trainer)
    meter.finish()
    size = backend.get_vocab_size() + 1
    if size < wanted:
        what = f"{wanted} is more than the text supports: after {size} tokens no pair is left to merge"
        raise InputError(Problem("--vocab-size", what, f"ask for {size} or fewer, or give more text"))
    tokenizer = _ended(backend, f"bpe {size}")
    if share < 1 and meter.total_bytes:
        sample = show_bytes(share * meter.total_bytes)
        tokenizer.note = f"the vocabulary was trained on an even sample of the text, {sample} of it"
    return tokenizer


def _training_share(config: DataConfig, sources: Sources, total_bytes: int | None) -> float:
    """The share of the text to train on that keeps memory within bounds."""
    if total_bytes is None or total_bytes <= DISTINCT_BYTES:
        return 1.0
    choose, words, seen_bytes = random.Random(0), set[str](), 0
    for piece in Cutter("gpt2").pieces(iter_chunks(sources, config)):
        if choose.random() < SAMPLE_BYTES / total_bytes:
            words.update(_WORD.findall(piece.text))
            seen_bytes += len(piece.text.encode())
    distinct = sum(len(word.encode()) for word in words) / seen_bytes if seen_bytes else 1.0
    return min(1.0, TRAIN_BYTES / total_bytes, DISTINCT_BYTES / (distinct * total_bytes))


def _training_texts(
    config: DataConfig, sources: Sources, meter: Meter, share: float, train_document: Callable[[int], bool] | None
) -> Iterator[str]:
    """Pieces to train on: all, or an even share of them chosen by a fixed seed."""
    choose = random.Random(0)
    document = 0
    for piece in Cutter("gpt2").pieces(iter_chunks(sources, config)):
        meter.add(len(piece.text.encode()))
        wanted = train_document is None or train_document(document)
        document += piece.ends
        if wanted and (share >= 1.0 or choose.random() < share):
            for start in range(0, len(piece.text), LONGEST_WORD) if _is_run(piece.text) else ():
                yield piece.text[start : start + LONGEST_WORD]
            if not _is_run(piece.text):
                yield piece.text


def _is_run(text: str) -> bool:
    return len(text) > 4 * LONGEST_WORD  # the cutter makes pieces this long only where no word ends


def _characters(config: DataConfig, sources: Sources, meter: Meter) -> Tokenizer:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    seen: set[str] = set()
    for chunk in iter_chunks(sources, config):
        seen.update(chunk.text)
        meter.add(len(chunk.text.encode()))
    meter.finish()
    backend = Backend(models.WordLevel({character: i for i, character in enumerate(sorted(seen))}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _ended(backend, f"char {len(seen) + 1}")


def _from_vocab_files(vocab_path: Path, merges_path: Path) -> Tokenizer:
    from tokenizers import models

    vocab = read_json(vocab_path)
    merges: list[tuple[str, str]] = []
    problems: list[Problem] = []
    if not all(type(token) is int for token in vocab.values()):
        problems.append(Problem(str(vocab_path), "must map tokens to ids"))
    try:
        lines = merges_path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(Problem(str(merges_path), f"cannot be read: {error}")) from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            what = f"{line!r} is not a merge of two tokens of {vocab_path.name}"
            problems.append(Problem(f"{merges_path}:{number}", what))
            if len(problems) > 5:
                break
            continue
        merges.append((pair[0], pair[1]))
    missing = [byte for byte, symbol in byte_alphabet().items() if symbol not in vocab]
    if missing:
        problems.append(Problem(str(vocab_path), f"is not byte-level: {len(missing)} of the 256 bytes are missing"))
    if problems:
        raise InputError(problems)
    gpt2 = len(vocab) == 50257 and vocab.get(EOT) == 50256
    name = "gpt2" if gpt2 else vocab_path.parent.name
    return _ended(_byte_level(models.BPE(vocab=vocab, merges=merges)), name, str(vocab_path))


def _gpt2() -> Tokenizer:
    """GPT-2's tokenizer from the local Hugging Face cache, or else from the hub."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    for repository in GPT2_REPOSITORIES:
        if isinstance(path := try_to_load_from_cache(repository, "tokenizer.json"), str):
            return Tokenizer.load(path, "gpt2")
    place = (GPT2_REPOSITORIES[0], "tokenizer.json")
    try:
        get_hf_file_metadata(hf_hub_url(*place), timeout=5)  # the download alone would try for half a minute
        return Tokenizer.load(hf_hub_download(*place), "gpt2")
    except InputError:
        raise
    except Exception as error:  # offline, blocked, timed out: each library version has its own exceptions for it
        what = "is not in the local Hugging Face cache, and the hub cannot be reached"
        fix = (
            "give a folder with vocab.json and merges.txt (or encoder.json and vocab.bpe): --tokenizer FOLDER\n"
            "    or train a vocabulary on the data: --tokenizer bpe"
        )
        raise InputError(Problem("--tokenizer gpt2", what, fix)) from error
