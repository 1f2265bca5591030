"""Text to token ids and back, whatever the vocabulary, always saved as a Hugging Face tokenizer.json.

Byte-level BPE (Sennrich et al. 2016; on bytes: Radford et al. 2019), single characters, single bytes, or any
tokenizer.json. End-of-text is an id of its own: text that happens to contain `<|endoftext|>` never becomes it.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podling.data.cutting import Family
from podling.data.readers import EOT
from podling.data.tokenizer_spec import (
    byte_alphabet,
    canonical,
    cut_family,
    describe,
    is_byte_level_spec,
    is_character_spec,
)
from podling.errors import InputError, Problem
from podling.files import atomic_write

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""What tokenizers call the token that ends a text, in the order they are looked for."""


class Tokenizer:
    """A vocabulary and its two directions. Build one with `podling.data.vocabulary.build_tokenizer` or `load`.

    Attributes:
        name: what it is, for people: "bpe 2048", "gpt2", "char 65", "bytes 257", or the name of its file.
        vocab_size: ids run from 0 to vocab_size - 1.
        eot_id: the id that ends every document.
        note: what people should know about how it was made; mostly empty.
        unk_id: the id that stands for text the vocabulary cannot express, or None when there is no such id.
        family: where long text may be cut without changing ids (see `cutting`).
        fingerprint: sha256 of the canonical tokenizer.json.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", name: str, where: str = "tokenizer.json"):
        # Plain text must not turn into special tokens; and no text may be cut or padded to a length, as files can ask.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spec: dict[str, Any] = json.loads(backend.to_str())
        self.name, self.note = name, ""
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eot_id = self._find_eot(where)
        self.unk_id = self._find_unk()
        self.family: Family = cut_family(self._spec)
        self.fingerprint = hashlib.sha256(canonical(self._spec)).hexdigest()
        dropout = self._spec["model"].get("dropout")
        if dropout:
            what = f"uses BPE dropout ({dropout}): the same text would give other ids each time"
            raise InputError(Problem(where, what, "set model.dropout to null in it"))

    @classmethod
    def load(cls, path: Path | str, name: str | None = None) -> "Tokenizer":
        """Read a tokenizer.json, podling's own or any other.

        Raises:
            InputError: the file is missing, is not a tokenizer.json, or has no end-of-text token.
        """
        import tokenizers

        path = Path(path)
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(Problem(str(path), f"cannot be read: {error}", "give a tokenizer.json")) from error
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            what = f"is not a Hugging Face tokenizer.json: {error}"
            raise InputError(Problem(str(path), what, "save one with tokenizer.save() of transformers")) from error
        return cls(backend, name or describe(json.loads(backend.to_str()), path), str(path))

    def save(self, path: Path | str) -> None:
        """Write the tokenizer.json, atomically."""
        atomic_write(path, self._backend.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with nothing added; never end-of-text.

        Raises:
            InputError: the vocabulary has no way to write a character.
        """
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> "list[np.ndarray]":
        """Ids of each text, int32 or uint32 [tokens]; uses all cores.

        Raises:
            InputError: the vocabulary has no way to write a character.
        """
        import numpy as np

        if self._code_points is not None:
            return [self._encode_characters(text) for text in texts]
        if self._is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise InputError(Problem(f"tokenizer {self.name}", f"cannot encode the text: {error}")) from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; end-of-text stands for nothing, and bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: an id is out of range.
        """
        if self._bytes is not None:
            return self.decode_bytes(ids).decode(errors="replace")
        return self._backend.decode([int(i) for i in self._checked(ids)], skip_special_tokens=True)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes `ids` stand for: exact for byte-level and character vocabularies, else the decoded text's.

        Raises:
            InputError: an id is out of range.
        """
        if self._bytes is None:
            return self.decode(ids).encode()
        return b"".join([self._bytes[i] for i in self._checked(ids)])

    def token_bytes(self) -> list[int] | None:
        """Bytes of text each id stands for, end-of-text 0; None where an id has no fixed bytes."""
        return None if self._bytes is None else [len(part) for part in self._bytes]

    def _checked(self, ids: Sequence[int]) -> Iterator[int]:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                what = f"token id {token} is out of range: ids run from 0 to {self.vocab_size - 1}"
                raise InputError(Problem(f"tokenizer {self.name}", what))
            yield token

    def _find_eot(self, where: str) -> int:
        for name in EOT_NAMES:
            if (token := self._backend.token_to_id(name)) is not None:
                return token
        what = "has no end-of-text token"
        raise InputError(Problem(where, what, f"add one to its added_tokens; known names: {', '.join(EOT_NAMES)}"))

    def _find_unk(self) -> int | None:
        model = self._spec["model"]
        if model["type"] == "Unigram":
            return model.get("unk_id")
        name = model.get("unk_token")
        if self._bytes is not None and {bytes([byte]) for byte in range(256)} <= set(self._bytes):
            return None  # files name one all the same, even end-of-text, but every text can be written
        return self._backend.token_to_id(name) if name else None

    @cached_property
    def _is_bytes(self) -> bool:
        """Whether ids below 256 are the bytes themselves."""
        return self.vocab_size == 257 and self._bytes == [*(bytes([b]) for b in range(256)), b""]

    @cached_property
    def _code_points(self) -> "np.ndarray | None":
        """For a character vocabulary: the id of every code point, -1 for none."""
        import numpy as np

        if not is_character_spec(self._spec):
            return None
        vocab = self._spec["model"]["vocab"]
        table = np.full(0x110000, -1, np.int32)
        table[[ord(character) for character in vocab]] = list(vocab.values())
        return table

    def _encode_characters(self, text: str) -> "np.ndarray":
        import numpy as np

        assert self._code_points is not None
        ids = self._code_points[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
        if ids.size and ids.min() < 0:
            place = int(np.argmin(ids))
            character = text[place]
            what = f"character {character!r} (U+{ord(character):04X}, at position {place}) is not in the vocabulary"
            fix = "leave it out, train with text that has it, or use --tokenizer bpe or bytes, which can write anything"
            raise InputError(Problem(f"tokenizer {self.name}", what, fix))
        return ids

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """What each id writes, or None when that depends on its neighbours."""
        parts = [b""] * self.vocab_size
        vocab: dict[str, int] = self._spec["model"]["vocab"] if self._spec["model"]["type"] != "Unigram" else {}
        if is_character_spec(self._spec):
            for character, token in vocab.items():
                parts[token] = character.encode()
        elif is_byte_level_spec(self._spec):
            byte_of = {character: byte for byte, character in byte_alphabet().items()}
            for symbols, token in vocab.items():
                if all(symbol in byte_of for symbol in symbols):
                    parts[token] = bytes([byte_of[symbol] for symbol in symbols])
        else:
            return None
        for added in self._spec["added_tokens"]:
            parts[added["id"]] = b"" if added["special"] else added["content"].encode()
        return parts
