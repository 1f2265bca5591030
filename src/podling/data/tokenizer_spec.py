"""Reading a tokenizer.json: what kind of vocabulary it is, and where its text may be cut."""

import json
from pathlib import Path
from typing import Any

from podling.data.cutting import Family

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = (_WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST)
"""The expressions of GPT-4 and Llama 3, and of Qwen 2."""


def byte_alphabet() -> dict[int, str]:
    """The printable character GPT-2 writes for each byte (Radford et al. 2019, `bytes_to_unicode`).

    Printable Latin-1 stands for itself; the rest take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def is_character_spec(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is a character vocabulary as podling writes it."""
    pre = spec.get("pre_tokenizer") or {}
    one_each = pre.get("type") == "Split" and pre.get("pattern") == {"Regex": r"[\s\S]"}
    model = spec["model"]
    return one_each and model["type"] == "WordLevel" and all(len(word) == 1 for word in model["vocab"])


def is_byte_level_spec(spec: dict[str, Any]) -> bool:
    """Whether each id stands for fixed bytes, spelled with `byte_alphabet`."""
    return spec["model"]["type"] == "BPE" and (spec.get("decoder") or {}).get("type") == "ByteLevel"


def cut_family(spec: dict[str, Any]) -> Family:
    """Where this tokenizer's text may be cut; only what is known to be exact."""
    pre = spec.get("pre_tokenizer") or {}
    plain_added = [token for token in spec["added_tokens"] if not token["special"]]
    if is_character_spec(spec):
        return "any"
    if spec.get("normalizer") is not None or plain_added or spec["model"]["type"] != "BPE":
        return "never"
    steps = pre.get("pretokenizers", [pre])
    if any(step.get("add_prefix_space") for step in steps):
        return "never"
    if steps[-1].get("type") != "ByteLevel":
        return "never"
    if len(steps) == 1:
        return "gpt2" if steps[0].get("use_regex", True) else "never"
    pattern = (steps[0].get("pattern") or {}).get("Regex", "")
    if len(steps) == 2 and steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
        if not steps[1].get("use_regex", True):
            return "gpt2" if pattern == GPT2_PATTERN else "words" if pattern in WORD_PATTERNS else "never"
    return "never"


def describe(spec: dict[str, Any], path: Path) -> str:
    """A name for a tokenizer.json, for people."""
    if is_character_spec(spec):
        return f"char {len(spec['model']['vocab']) + 1}"
    return path.parent.name if path.name == "tokenizer.json" and path.parent.name else path.name


def canonical(spec: dict[str, Any]) -> bytes:
    """The same bytes for the same tokenizer, however it was written."""
    return json.dumps(spec, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
