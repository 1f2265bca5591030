"""The vocabulary's size, as far as it is known without reading text."""

from dataclasses import replace

from podling.config import Config, DataConfig
from podling.data.prepare import is_prepared, prepare
from podling.data.vocabulary import known_tokenizer
from podling.errors import InputError, Problem
from podling.files import read_json

GPT2_VOCAB = 50257  # of its published tokenizer, which needs not be here to draw or to plan with


def with_vocabulary(config: Config, *, as_train: bool = False) -> tuple[Config, list[str], list[Problem]]:
    """The configuration with the vocabulary's size in it.

    Args:
        config: settled and without problems.
        as_train: refuse what train would: another size than the tokenizer has, prepared data made otherwise.

    Returns:
        The configuration, notes for the person, and why the size is not known or not the one that was asked for.
    """
    asked = config.model.vocab_size
    if asked and not as_train:
        return config, [], []
    problems: list[Problem] = []
    try:
        size, note = _tokenizer_size(config.data)
    except InputError as error:
        return config, [], error.problems
    if size is None and not asked:
        fix = "say how many there are with --model.vocab-size"
        problems.append(Problem("--tokenizer", "how many characters a text has is only known from the text", fix))
    elif size is not None and asked not in (0, size):
        what = f"is {asked}, and the tokenizer has {size} tokens"
        problems.append(Problem("--model.vocab-size", what, "leave it out: it is taken from the tokenizer"))
    model = replace(config.model, vocab_size=asked if size is None else size)
    return replace(config, model=model), [note] if note else [], problems


def _tokenizer_size(data: DataConfig) -> tuple[int | None, str]:
    """Tokens of the tokenizer that train would use, None where only the text tells; and a note.

    Raises:
        InputError: there is no such tokenizer, or prepared data was made with other settings.
    """
    if len(data.paths) == 1 and is_prepared(data.paths[0]):
        manifest = read_json(prepare(data) / "manifest.json")  # nothing is made: it is compared with the settings
        return manifest["tokenizer"]["vocab_size"], ""
    if data.tokenizer == "bpe":
        return data.vocab_size, f"vocabulary: {data.vocab_size}, as asked of the tokenizer that train would make"
    if data.tokenizer == "gpt2":
        return GPT2_VOCAB, ""
    if data.tokenizer == "char":
        return None, ""
    return known_tokenizer(data.tokenizer).vocab_size, ""
