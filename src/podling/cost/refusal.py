"""A compiler's "out of memory" read back: what needed how much, of how much, and what took most of it."""

import math
import re
from dataclasses import dataclass

from podling.cost.naming import words
from podling.cost.records import CATEGORIES, Hbm, Tensor
from podling.files import show_binary
from podling.hlo.text import read_shapes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_TEMPORARIES = re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Ran out of memory in memory space (\w+)\. Used {_SIZE} of {_SIZE}")
_ARGUMENTS = re.compile(rf"^\s*arguments\s+{_SIZE}", re.MULTILINE)
_ALLOCATION = re.compile(
    rf"^\s*\d+\. Size: {_SIZE}\n(?:\s*Operator: (?P<operator>.*)\n)?\s*Shape: (?P<shape>.*)\n", re.MULTILINE
)


@dataclass(frozen=True)
class Refusal:
    """Why the compiler did not take a program."""

    hbm: Hbm  # what it said that the program needs; total_bytes is 0 where it is not for want of device memory
    words: str  # one sentence


def read_refusal(text: str, limit_bytes: int) -> Refusal:
    """Read what a compiler raised.

    Args:
        text: the exception's text, or all that the compiler wrote.
        limit_bytes: what one device has, where the text does not say.
    """
    if found := _TEMPORARIES.search(text):
        # It says temporaries and counts the arguments too, but no gaps between arrays: gpt2-xl's state of 12 bytes a
        # parameter is 17.4 GiB, what comes and goes in its step 9.2, and 26.65 is what it says.
        need, limit = _bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])
        return _refusal(text, need, limit, "the step needs at least")
    if found := _USED.search(text):
        space, need, limit = found[1], _bytes(found[2], found[3]), _bytes(found[4], found[5])
        if space == "hbm":
            arguments = _ARGUMENTS.search(text)
            need += _bytes(*arguments.groups()) if arguments else 0
            return _refusal(text, need, limit, "the step needs")
        has = f"the chip's {space}, which has {show_binary(limit)}"
        return Refusal(_hbm(text, 0, limit_bytes), f"an operation of the step needs {show_binary(need)} of {has}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if "RESOURCE_EXHAUSTED" in line), lines[0] if lines else "it gave no reason")
    if "RESOURCE_EXHAUSTED" in text:
        return Refusal(_hbm(text, limit_bytes + 1, limit_bytes), f"the compiler ran out of memory: {said[:200]}")
    return Refusal(_hbm(text, 0, limit_bytes), f"the compiler failed: {said[:200]}")


def _refusal(text: str, need: int, limit: int, what: str) -> Refusal:
    hbm = _hbm(text, need, limit)
    over = f"{what} {show_binary(need)}, and a device has {show_binary(limit)}: {show_binary(need - limit)} too much"
    taken = [f"{tensor.name} ({show_binary(tensor.device_bytes)})" for tensor in hbm.largest[:3]]
    return Refusal(hbm, over + (f"; most of it {', '.join(taken)}" if taken else ""))


def _hbm(text: str, need: int, limit: int) -> Hbm:
    """All of it as temporary: a refusal does not say what it is for."""
    by_category = {category: need if category == "temporary" else 0 for category in CATEGORIES}
    return Hbm(need, limit, by_category, _largest(text), "compiler")


def _largest(text: str) -> tuple[Tensor, ...]:
    found = []
    for match in _ALLOCATION.finditer(text):
        shapes = read_shapes(match["shape"])
        op_name = re.search(r'op_name="([^"]*)"', match["operator"] or "")
        name = words([op_name[1]], shapes[0].dims if shapes else ()) if op_name else "made by the compiler"
        size = _bytes(match[1], match[2])
        found.append(Tensor(name, "temporary", str(shapes[0]) if shapes else match["shape"].strip(), size))
    return tuple(found)


def _bytes(number: str, unit: str) -> int:
    """XLA prints powers of 1024, rounded to two decimals."""
    return math.ceil(float(number) * _UNITS[unit])
