"""The vocabulary's size, as far as it is known without reading text."""

from dataclasses import replace
from pathlib import Path

from podling.config import Config
from podling.data.prepare import is_prepared
from podling.data.vocabulary import known_tokenizer
from podling.errors import InputError, Problem
from podling.files import read_json

GPT2_VOCAB = 50257  # of its published tokenizer, which needs not be here to draw or to plan with


def with_vocabulary(config: Config) -> tuple[Config, list[str], list[Problem]]:
    """The configuration with the vocabulary's size in it.

    Args:
        config: settled and without problems.

    Returns:
        The configuration, notes for the person, and why the size is not known.
    """
    data, size, note = config.data, config.model.vocab_size, ""
    problems: list[Problem] = []
    if size:
        pass
    elif len(data.paths) == 1 and is_prepared(data.paths[0]):
        size = read_json(Path(data.paths[0]) / "manifest.json")["tokenizer"]["vocab_size"]
    elif data.tokenizer == "bpe":
        size, note = data.vocab_size, f"vocabulary: {data.vocab_size}, as asked of the tokenizer that train would make"
    elif data.tokenizer == "gpt2":
        size = GPT2_VOCAB
    elif data.tokenizer == "char":
        fix = "say how many there are with --model.vocab-size"
        problems.append(Problem("--tokenizer", "how many characters a text has is only known from the text", fix))
    else:
        try:
            size = known_tokenizer(data.tokenizer).vocab_size
        except InputError as error:
            problems += error.problems
    model = replace(config.model, vocab_size=size)
    return replace(config, model=model), [note] if note else [], problems
