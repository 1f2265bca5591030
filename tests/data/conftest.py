"""Small texts that the tests make themselves, and data prepared from them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from podling.config import DataConfig
from podling.data.prepare import prepare

# What a test tries is the same every time, and a slow machine fails nothing.
settings.register_profile("podling", deadline=None, derandomize=True, database=None)
settings.load_profile("podling")

WORDS = "the a river stone light under over walks sings don't we'll 1984 42 , . ; ! ( ) émigré 日本語 文章 。 、 カナ"


def make_text(characters: int, seed: int = 0) -> str:
    """Words, numbers, contractions, punctuation and Japanese, the same for the same seed."""
    choose = random.Random(seed)
    return " ".join(choose.choices([*WORDS.split(" "), "\n", "\n\n"], k=characters // 4))[:characters]


@pytest.fixture(scope="session")
def text_of() -> Callable[..., str]:
    """`make_text`, for tests that need a size of their own."""
    return make_text


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(make_text(60_000))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents in one .jsonl and two .txt files."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(1)
    lines = [json.dumps({"text": make_text(choose.randint(8, 900), i)}) for i in range(298)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "a.txt").write_text(make_text(5000, 1000))
    (folder / "b.txt").write_text(make_text(700, 1001))
    return folder


@pytest.fixture(scope="session")
def prepared_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, prepared with a BPE of 320 and a tenth held out."""
    config = DataConfig(paths=(str(corpus),), vocab_size=320, holdout=0.1)
    return prepare(config, tmp_path_factory.mktemp("out") / "prepared")
