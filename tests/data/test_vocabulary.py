"""Making vocabularies: trained, collected, and read from GPT-2's two files."""

import json
import os
from pathlib import Path

import pytest

from podling.config import DataConfig
from podling.data import vocabulary
from podling.data.corpus import find_sources
from podling.data.tokenizer_spec import byte_alphabet
from podling.data.vocabulary import build_tokenizer, check_tokenizer, from_path
from podling.errors import InputError


def build(path, progress=None, total_bytes=None, train_document=None, **settings):
    config = DataConfig(paths=(str(path),), **settings)
    return build_tokenizer(
        config, find_sources(config), progress, total_bytes=total_bytes, train_document=train_document
    )


def test_bpe_has_the_size_asked_for_and_ends_with_end_of_text(text_file):
    tokenizer = build(text_file, vocab_size=340)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("bpe 340", 340, 339)
    text = text_file.read_text()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < 0.5 * len(text.encode())


def test_bpe_training_is_deterministic(text_file):
    assert build(text_file, vocab_size=330).fingerprint == build(text_file, vocab_size=330).fingerprint


def test_more_tokens_than_the_text_supports(tmp_path):
    (tmp_path / "a.txt").write_text("abab cdcd " * 100)
    with pytest.raises(InputError) as caught:
        build(tmp_path / "a.txt", vocab_size=1000)
    # "abab", " abab" and " cdcd" are all there is to learn: ab, cd, abab, cdcd and two with a space, plus end-of-text.
    size = int(str(caught.value).split("after ")[1].split(" ")[0])
    assert 257 + 4 <= size <= 257 + 8
    assert build(tmp_path / "a.txt", vocab_size=size).vocab_size == size
    with pytest.raises(InputError, match="more than the text supports"):
        build(tmp_path / "a.txt", vocab_size=size + 1)


def test_bad_requests_are_found_without_reading_text(tmp_path):
    assert "257" in str(check_tokenizer(DataConfig(vocab_size=256))[0])
    assert not check_tokenizer(DataConfig(vocab_size=257))
    assert not check_tokenizer(DataConfig(tokenizer="char", vocab_size=3))
    assert "neither a kind of tokenizer nor a path" in str(check_tokenizer(DataConfig(tokenizer="bep"))[0])
    assert not check_tokenizer(DataConfig(tokenizer=str(tmp_path)))


def test_held_out_documents_teach_the_vocabulary_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aa aa"}\n{"text": "zqzqzq zqzqzq"}\n')
    only_first = build(tmp_path / "a.jsonl", vocab_size=258, train_document=lambda document: document == 0)
    assert len(only_first.encode("aa")) == 1 and len(only_first.encode("zq")) == 2


def test_long_text_is_sampled_evenly_and_said(tmp_path, text_of, monkeypatch):
    """Training memory follows the different words, so text that hardly repeats is trained on in part."""
    monkeypatch.setattr(vocabulary, "DISTINCT_BYTES", 30_000)
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 200_000)
    lines = [json.dumps({"text": f"word{i * 7919} other{i * 104729}"}) for i in range(20_000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    total = sum(len(json.loads(line)["text"]) for line in lines)
    config = DataConfig(paths=(str(tmp_path),), vocab_size=300)
    share = vocabulary._training_share(config, find_sources(config), total)
    assert 0.03 < share < 0.1
    tokenizer = build(tmp_path, total_bytes=total, vocab_size=300)
    assert tokenizer.note.startswith("the vocabulary was trained on an even sample of the text")
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:100] * 200))
    assert vocabulary._training_share(config, find_sources(config), total) == 1.0


def test_an_endless_word_is_cut_for_training(tmp_path):
    """A run of a million letters is no word: the library would need a gigabyte and hours for a few of them."""
    (tmp_path / "a.txt").write_text("ab" * 700_000)
    config = DataConfig(paths=(str(tmp_path),), vocab_size=260)
    meter = vocabulary.Meter("x", None, None)
    texts = list(vocabulary._training_texts(config, find_sources(config), meter, 1.0, None))
    assert "".join(texts) == "ab" * 700_000
    assert max(map(len, texts)) == vocabulary.LONGEST_WORD
    assert build(tmp_path, vocab_size=260).vocab_size == 260


def test_characters_are_those_of_the_text_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("cab\n日")
    tokenizer = build(tmp_path, tokenizer="char")
    assert (tokenizer.name, tokenizer.vocab_size) == ("char 6", 6)
    assert tokenizer.encode("\nabc日") == [0, 1, 2, 3, 4]


def gpt2_files(folder, names, merges=("Ġ t", "h e", "Ġt he"), eot=True):
    folder.mkdir(exist_ok=True)
    symbols = [*byte_alphabet().values(), *(merge.replace(" ", "") for merge in merges)]
    vocab = {symbol: token for token, symbol in enumerate(symbols)} | ({"<|endoftext|>": len(symbols)} if eot else {})
    (folder / names[0]).write_text(json.dumps(vocab))
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


@pytest.mark.parametrize("names", vocabulary.VOCAB_FILES)
@pytest.mark.parametrize("eot", [True, False])
def test_gpt2_style_files(tmp_path, names, eot):
    tokenizer = from_path(str(gpt2_files(tmp_path / "mine", names, eot=eot)))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("mine", 260, 259)
    assert tokenizer.encode(" the") == [258]
    assert tokenizer.encode("<|endoftext|>")[0] == tokenizer.encode("<")[0]


def test_broken_gpt2_files(tmp_path):
    folder = gpt2_files(tmp_path / "mine", ("vocab.json", "merges.txt"))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ t\nq qq\nh\n")
    with pytest.raises(InputError) as caught:
        from_path(str(folder))
    assert [problem.where for problem in caught.value.problems] == [f"{folder}/merges.txt:{n}" for n in (3, 4)]
    (folder / "vocab.json").write_text('{"a": 0, "b": "x"}')
    (folder / "merges.txt").write_text("")
    with pytest.raises(InputError, match="must map tokens to ids(.|\n)*254 of the 256 bytes are missing"):
        from_path(str(folder))
    (folder / "merges.txt").unlink()
    with pytest.raises(InputError, match="holds no tokenizer.json"):
        from_path(str(folder))


def test_gpt2_from_the_cache_or_what_to_do_instead(tmp_path, monkeypatch):
    """Offline and not in the cache: the message leads to a vocabulary that needs no hub. In the cache: no network."""
    import huggingface_hub

    config = DataConfig(tokenizer="gpt2")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    with pytest.raises(InputError, match="hub cannot be reached(.|\n)*--tokenizer FOLDER(.|\n)*--tokenizer bpe"):
        build_tokenizer(config, find_sources(DataConfig()))
    path = tmp_path / "tokenizer.json"
    from_path(str(gpt2_files(tmp_path / "mine", ("vocab.json", "merges.txt")))).save(path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(path))
    assert build_tokenizer(config, find_sources(DataConfig())).name == "gpt2"


def published_gpt2() -> Path | None:
    """GPT-2's own two files, where someone has put them: they are not part of this repository."""
    folder = Path(os.environ.get("PODLING_GPT2_VOCAB", "gpt2-vocab"))
    return folder if any((folder / vocab).exists() for vocab, _ in vocabulary.VOCAB_FILES) else None


@pytest.mark.skipif(published_gpt2() is None, reason="PODLING_GPT2_VOCAB names no folder with GPT-2's vocabulary")
def test_gpt2_s_own_vocabulary_gives_its_ids():
    tokenizer = from_path(str(published_gpt2()))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("gpt2", 50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]


@pytest.mark.parity
@pytest.mark.parametrize("published", [False, True])
def test_ids_are_those_of_transformers_own_gpt2_tokenizer(tmp_path, published, text_of):
    """GPT2Tokenizer reads the same two files by its own route."""
    from transformers import GPT2Tokenizer

    folder = published_gpt2() if published else gpt2_files(tmp_path / "mine", ("vocab.json", "merges.txt"))
    if folder is None:
        pytest.skip("PODLING_GPT2_VOCAB names no folder with GPT-2's vocabulary")
    vocab, merges = next(pair for pair in vocabulary.VOCAB_FILES if (folder / pair[0]).exists())
    lines = (folder / merges).read_text().split("\n")[1:-1]
    theirs = GPT2Tokenizer(vocab=json.loads((folder / vocab).read_text()), merges=[tuple(x.split()) for x in lines])
    tokenizer = from_path(str(folder))
    for text in ("Hello world", " the  theme's\n\n the", text_of(20_000)):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
