"""What the summary suggests to type."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from podling.train.finish import example_prompt

EOT = 256


class Bytes:
    eot_id = EOT

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


@dataclass
class Fake:
    text: bytes
    kind: str = "text"
    tokenizer: Bytes = field(default_factory=Bytes)

    def tokens(self, split: str) -> np.ndarray:
        assert split == "heldout"
        return np.array([EOT, *self.text], np.int32)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("It was the best of times, it was the worst", "It was the"),
        ("\n\n  Chapter One of the book\nText", "Chapter One of"),
        ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", "吾輩は猫である。"),
        ("", ""),
    ],
)
def test_the_prompt_is_how_the_text_begins(text: str, prompt: str) -> None:
    assert example_prompt(Fake(text.encode())) == prompt  # type: ignore[arg-type]


def test_code_is_asked_for_a_function() -> None:
    assert example_prompt(Fake(b"import os", kind="python")) == "def "  # type: ignore[arg-type]
