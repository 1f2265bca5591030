"""How many tokens a person's text holds: counted, guessed, or not known, and said which."""

import gzip
import json

import pytest

from podling.config import DataConfig
from podling.data.prepare import prepare
from podling.errors import InputError
from podling.plan.data_size import bytes_per_token, data_tokens

LINE = "It was a bright cold day in April, and the clocks were striking thirteen. "


def test_prepared_data_is_counted(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(LINE * 20 + str(number))
    made = prepare(DataConfig(paths=(str(tmp_path),), tokenizer="bytes"), tmp_path / "prepared", None)
    tokens, words = data_tokens(DataConfig(paths=(str(made),)))
    manifest = json.loads((made / "manifest.json").read_text())
    assert (tokens, words) == (manifest["splits"]["train"]["tokens"], "")
    # Bytes are the one tokenizer whose guess must be near: all but the held-out share and the ends of documents.
    guess, words = data_tokens(DataConfig(paths=(str(tmp_path / "0.txt"),), tokenizer="bytes", holdout=0.05))
    assert guess == round(0.95 * (20 * len(LINE) + 1)) and "1.0 bytes a token: a guess; podling prepare" in words


def test_text_is_guessed_from_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 10_000)
    (tmp_path / "b.jsonl").write_text("y" * 10_000)
    tokens, words = data_tokens(DataConfig(paths=(str(tmp_path),), tokenizer="gpt2", holdout=0.1))
    assert tokens == round(19_000 * 0.9 / 4.5) and words.startswith("data: 19.0 kB of text, taken as 4.5 bytes a token")
    less, _ = data_tokens(DataConfig(paths=(str(tmp_path),), tokenizer="gpt2", holdout=0.1, limit="9kB"))
    assert less == round(9_000 * 0.9 / 4.5)
    with gzip.open(tmp_path / "c.txt.gz", "wb") as file:
        file.write(b"z" * 1000)
    size = (tmp_path / "c.txt.gz").stat().st_size
    packed, words = data_tokens(DataConfig(paths=(str(tmp_path / "c.txt.gz"),), tokenizer="bytes", holdout=0.5))
    assert packed == round(size * 3 / 2) and "unpacked, by a guess" in words


def test_what_is_not_known(monkeypatch, tmp_path):
    assert data_tokens(DataConfig()) == (None, "")
    monkeypatch.setattr("podling.data.sources.installed", lambda name: True)
    tokens, words = data_tokens(DataConfig(paths=("hf:someone/something",)))
    assert tokens is None and "podling prepare" in words
    with pytest.raises(InputError, match="does not exist"):
        data_tokens(DataConfig(paths=(str(tmp_path / "nowhere"),)))


@pytest.mark.parametrize(("vocab", "counted"), [(1024, 2.71), (2048, 3.19), (2048, 3.14), (8192, 4.01), (32768, 4.50)])
def test_the_guess_is_near_what_was_counted(vocab, counted):
    """As counted with `podling prepare`, on Python (1024, 2048) and on English."""
    assert bytes_per_token(DataConfig(vocab_size=vocab)) == pytest.approx(counted, rel=0.04)
    assert 1 <= bytes_per_token(DataConfig(vocab_size=1)) < 2
