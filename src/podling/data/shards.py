"""Prepared data on disk: memory-mapped token shards, the tokenizer that made them, and a manifest with hashes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from podling.data.tokenizer import Tokenizer
from podling.errors import InputError, Problem, raise_if
from podling.files import atomic_write, counted, read_json, show_bytes, writing

FORMAT = "podling-tokens-1"
SPLITS: "tuple[SplitName, ...]" = ("train", "heldout")
DOCUMENT_DTYPE = np.dtype([("start", "<u8"), ("source", "<u4"), ("index", "<u8")])
"""One row for each document a shard holds part of: first token in the shard, source, number within the source."""

SplitName = Literal["train", "heldout"]


class ShardWriter:
    """Writes one shard: tokens to NAME.bin, its documents to NAME.docs.npy. Both exist only if it got tokens."""

    def __init__(self, folder: Path, name: str, vocab_size: int, eot_id: int):
        self._folder, self._name, self._vocab_size, self._eot_id = folder, name, vocab_size, eot_id
        self._dtype = token_dtype(vocab_size)
        self._file = None
        self._hash = hashlib.sha256()
        self._documents: list[tuple[int, int, int]] = []
        self.tokens = self.text_bytes = self.ended = 0

    def add(self, parts: Iterable[tuple[np.ndarray, int, int, bool, int]]) -> None:
        """Append (ids, source, index, ends, text bytes) of each part; end-of-text follows a part that ends.

        Raises:
            InputError: an id is outside the vocabulary (the embedding would silently clamp it).
            RunError: the disk is full.
        """
        arrays: list[np.ndarray] = []
        end = np.array([self._eot_id], np.int64)
        for ids, source, index, ends, text_bytes in parts:
            if not self._documents or self._documents[-1][1:] != (source, index):
                self._documents.append((self.tokens, source, index))
            arrays += [ids, end] if ends else [ids]
            self.tokens += ids.size + ends
            self.text_bytes += text_bytes
            self.ended += ends
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        if not tokens.size:
            return
        for bad in (int(tokens.min()), int(tokens.max())):
            if not 0 <= bad < self._vocab_size:
                what = f"token id {bad} is out of range: the vocabulary has {self._vocab_size}"
                raise InputError(Problem(str(self._folder), what, "use the tokenizer's own vocabulary"))
        path = self._folder / f"{self._name}.bin"
        with writing(path):
            if self._file is None:
                self._file = open(path, "wb")  # noqa: SIM115 - closed by finish
            data = tokens.astype(self._dtype).tobytes()
            self._hash.update(data)
            self._file.write(data)

    def finish(self) -> dict[str, Any] | None:
        """Sync the shard and describe it for the manifest; None when it is empty."""
        if self._file is None:
            return None
        path = self._folder / f"{self._name}.docs.npy"
        with writing(path), self._file as file:
            file.flush()
            os.fsync(file.fileno())
            table = np.array(self._documents, DOCUMENT_DTYPE)
            with open(path, "wb") as docs:
                np.save(docs, table, allow_pickle=False)
                docs.flush()
                os.fsync(docs.fileno())
        return {
            "file": f"{self._name}.bin",
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "ended": self.ended,
            "sha256": self._hash.hexdigest(),
        }

    def abandon(self) -> None:
        """Close without finishing; closing may try once more to write what could not be written."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id: uint16 up to 65,536, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenArray:
    """A split's tokens as one array, memory-mapped from its shards; slices come as int32 copies."""

    def __init__(self, shards: list[np.ndarray]):
        self._shards = shards
        self._ends = np.cumsum([shard.size for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> np.ndarray: ...
    def __getitem__(self, place: int | slice) -> int | np.ndarray:
        if isinstance(place, int | np.integer):
            if not -len(self) <= place < len(self):
                raise IndexError(f"token {place} of {len(self)}")
            place = int(place) % len(self)
            return int(self[place : place + 1][0])
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError("token slices have step 1")
        shard = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            first = int(self._ends[shard]) - self._shards[shard].size
            parts.append(self._shards[shard][start - first : stop - first])
            start, shard = int(self._ends[shard]), shard + 1
        if len(parts) == 1:
            return parts[0].astype(np.int32)
        return np.concatenate([part.astype(np.int32) for part in parts]) if parts else np.zeros(0, np.int32)


class Prepared:
    """A folder of prepared data, opened for reading.

    Attributes:
        path: the folder.
        manifest: what it holds and how it was made.
        tokenizer: the tokenizer its tokens belong to.
        fingerprint: hash over tokenizer, tokens and split; equal fingerprints mean the same training data.
        kind: "python" when nearly all text came from .py files, else "text".
    """

    def __init__(self, path: Path, manifest: dict[str, Any], tokenizer: Tokenizer):
        self.path, self.manifest, self.tokenizer = path, manifest, tokenizer
        self.fingerprint: str = manifest["fingerprint"]
        self.kind: Literal["python", "text"] = manifest["kind"]

    @classmethod
    def open(cls, path: Path | str, verify: bool = False) -> "Prepared":
        """Open a folder that `podling prepare` wrote, checking the size of every file (and with `verify` its hash).

        Raises:
            InputError: it is no such folder, or files are missing, cut short, changed or of another tokenizer.
        """
        path = Path(path)
        fix = f"delete {path} and prepare the data again"
        if not (path / "manifest.json").exists():
            raise InputError(Problem(str(path), "is not prepared data (no manifest.json)", "run podling prepare first"))
        manifest = read_json(path / "manifest.json")
        if manifest.get("format") != FORMAT:
            what = f"is of format {manifest.get('format')!r}; this podling reads {FORMAT}"
            raise InputError(Problem(str(path / "manifest.json"), what, fix))
        tokenizer = Tokenizer.load(path / "tokenizer.json", manifest["tokenizer"]["name"])
        problems = list(_shard_problems(path, manifest, verify, fix))
        if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
            problems.append(Problem(str(path / "tokenizer.json"), "is not the tokenizer that made these tokens", fix))
        raise_if(problems)
        return cls(path, manifest, tokenizer)

    def tokens(self, split: SplitName) -> TokenArray:
        """All tokens of a split, in reading order."""
        dtype = np.dtype(self.manifest["dtype"])
        shards = self.manifest["splits"][split]["shards"]
        return TokenArray([np.memmap(self.path / shard["file"], dtype, "r") for shard in shards])

    def bytes(self, split: SplitName) -> int:
        """Bytes of text (UTF-8) the split's tokens stand for."""
        return self.manifest["splits"][split]["text_bytes"]

    def document_at(self, split: SplitName, token_index: int) -> str:
        """The document a token belongs to, for messages: 'books/emma.txt' or 'rows.jsonl (document 12)'."""
        shards = self.manifest["splits"][split]["shards"]
        for shard, table in zip(shards, self.document_tables[split], strict=True):
            if token_index < shard["tokens"]:
                row = table[max(int(np.searchsorted(table["start"], token_index, side="right")) - 1, 0)]
                return self.document_name(int(row["source"]), int(row["index"]))
            token_index -= shard["tokens"]
        raise IndexError("token index past the end of the split")

    def document_name(self, source: int, index: int) -> str:
        """What people call the document at this place of this source."""
        about = self.manifest["sources"][source]
        return about["name"] if about["documents"] == 1 else f"{about['name']} (document {index})"

    @cached_property
    def document_tables(self) -> "dict[SplitName, list[np.ndarray]]":
        """For each shard of a split its documents, rows of `DOCUMENT_DTYPE`."""
        splits = self.manifest["splits"]
        return {
            split: [
                np.load(self.path / shard["file"].replace(".bin", ".docs.npy"), mmap_mode="r")
                for shard in splits[split]["shards"]
            ]
            for split in SPLITS
        }

    def summary(self) -> str:
        """Two lines or a few: what the text is, and what is held out; then what was left out or changed."""
        train, heldout = (self.manifest["splits"][split] for split in SPLITS)
        documents, tokens = self.manifest["documents"], train["tokens"] + heldout["tokens"]
        text_bytes = train["text_bytes"] + heldout["text_bytes"]
        lines = [
            f"{counted(documents, 'document')}, {show_bytes(text_bytes)} of text, {tokens:,} tokens of "
            f"{self.tokenizer.name} ({text_bytes / tokens:.2f} bytes per token)",
            f"held out: {self.manifest['split']}; {show_bytes(heldout['text_bytes'])} "
            f"({heldout['text_bytes'] / text_bytes:.1%}), {heldout['tokens']:,} tokens",
        ]
        return "\n".join(lines + self.manifest["notes"])


def _shard_problems(path: Path, manifest: dict[str, Any], verify: bool, fix: str) -> Iterable[Problem]:
    item_bytes = np.dtype(manifest["dtype"]).itemsize
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            file = path / shard["file"]
            wanted = shard["tokens"] * item_bytes
            if not file.exists() or not file.with_suffix(".docs.npy").exists():
                yield Problem(str(file), "is missing, or its .docs.npy is", fix)
            elif (size := file.stat().st_size) != wanted:
                yield Problem(str(file), f"has {size:,} bytes where the manifest says {wanted:,}", fix)
            elif verify:
                with open(file, "rb") as stream:
                    if hashlib.file_digest(stream, "sha256").hexdigest() != shard["sha256"]:
                        yield Problem(str(file), "is corrupt: its hash is not the manifest's", fix)


def fingerprint(tokenizer: Tokenizer, splits: dict[str, Any]) -> str:
    """sha256 over the tokenizer and the hash of every shard."""
    shards = {split: [shard["sha256"] for shard in splits[split]["shards"]] for split in SPLITS}
    return hashlib.sha256(json.dumps([tokenizer.fingerprint, shards], sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json, the file that makes a folder prepared data."""
    atomic_write(folder / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
