"""GPT-2 weights out of safetensors files, checked against the shapes they should have before any is read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from podling.config import ModelConfig
from podling.errors import InputError, Problem, raise_if
from podling.files import read_json
from podling.interop.names import PREFIX, hf_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks that old files carry along
SHOWN = 8  # names listed of a kind; a file of another model would otherwise list hundreds


class Weights(Mapping[str, np.ndarray]):
    """Tensors by name without prefix; nothing is read before it is asked for.

    Both key styles are understood: `transformer.h.0...` and `h.0...`.

    Args:
        folder: holds model.safetensors, its sharded form with an index, or one other .safetensors file.

    Raises:
        InputError: no such file, a broken one, or one tensor under two names.
    """

    def __init__(self, folder: Path):
        self._tensors: dict[str, tuple[Path, str, tuple[int, ...], str]] = {}
        problems: list[Problem] = []
        for path in _files(folder):
            try:
                with safe_open(path, "numpy") as file:
                    for key in file.keys():  # noqa: SIM118
                        part = file.get_slice(key)
                        name = key.removeprefix(PREFIX)
                        if name in self._tensors:
                            what = f"{key} and {self._tensors[name][1]} are the same tensor"
                            problems.append(Problem(str(path), what))
                        self._tensors[name] = (path, key, tuple(part.get_shape()), part.get_dtype())
            except SafetensorError as error:
                what = f"is not a whole safetensors file: {error}"
                problems.append(Problem(str(path), what, "download or copy it again"))
        raise_if(problems)

    def __getitem__(self, name: str) -> np.ndarray:
        path, key, _, _ = self._tensors[name]
        with safe_open(path, "numpy") as file:
            tensor = np.asarray(file.get_tensor(key), np.float32)
        if not np.isfinite(tensor).all():
            raise InputError(Problem(f"{path}: {key}", "holds numbers that are not finite"))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def dtypes(self) -> list[str]:
        """Which float types the tensors have."""
        return sorted({FLOATS.get(dtype, dtype) for *_, dtype in self._tensors.values()})

    def check(self, cfg: ModelConfig, folder: Path) -> None:
        """Compare names, shapes and types with what a GPT-2 of this configuration has.

        Raises:
            InputError: listing what is missing, unknown, of another shape or type, or a head that is not tied.
        """
        expected = hf_shapes(cfg)
        found = {n: t for n, t in self._tensors.items() if not n.endswith(BUFFERS) and n != "lm_head.weight"}
        where = str(folder)
        problems = []
        for what, names in (
            ("tensors are missing", [n for n in expected if n not in found]),
            ("tensors are none of GPT-2's", [t[1] for n, t in found.items() if n not in expected]),
        ):
            if names:
                problems.append(Problem(where, f"{len(names)} {what}: {_some(names)}"))
        for name, (_, key, shape, dtype) in found.items():
            if name in expected and shape != expected[name]:
                what = f"{key} is {list(shape)}, and its config.json makes it {list(expected[name])}"
                problems.append(Problem(where, what))
            if dtype not in FLOATS:
                problems.append(Problem(where, f"{key} is {dtype}", "podling reads F32, F16 and BF16"))
        if not problems and "lm_head.weight" in self and not np.array_equal(self["lm_head.weight"], self["wte.weight"]):
            what = "lm_head.weight differs from wte.weight: a head of its own (untied) is not implemented"
            problems.append(Problem(where, what))
        raise_if(problems)


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        what = f"holds {len(others)} safetensors files and no {INDEX}: {_some([p.name for p in others])}"
        raise InputError(Problem(str(folder), what, f"keep one of them, or add {INDEX}"))
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickles:
        fix = "load and save it with transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        what = f"holds pickled weights ({_some(pickles)}), and reading those runs code; podling reads safetensors"
        raise InputError(Problem(str(folder), what, fix))
    raise InputError(Problem(str(folder), f"holds no {SINGLE}", "give the folder of a Hugging Face GPT-2"))


def _sharded(folder: Path) -> list[Path]:
    index: dict[str, Any] = read_json(folder / INDEX)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise InputError(Problem(str(folder / INDEX), "has no weight_map of tensor names to file names"))
    names = sorted(set(listed.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise InputError(Problem(str(folder / INDEX), f"names files outside its folder: {_some(outside)}"))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise InputError(Problem(str(folder), f"these files of its index are missing: {_some(missing)}"))
    return [folder / name for name in names]


def metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says about itself; empty when it is no such file."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, json.JSONDecodeError):
        return {}


def sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order, in place; the library leaves it to chance.

    Equal models are equal files then. The header is a JSON object, led by its length in 8 little-endian bytes and
    padded with spaces (https://github.com/huggingface/safetensors, "Format").
    """
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:
            raise ValueError(f"{path}: its header would not fit its place")
        file.seek(8)
        file.write(text.ljust(length))


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f", and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
