"""Records back from JSON, checked: a file of the cache may hold anything."""

import math
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def decode(hint: Any, value: Any) -> Any:
    """A value of this type from what JSON made of it.

    Args:
        hint: a dataclass, `int`, `float`, `str`, None, or a tuple, dict, Literal or union of such.
        value: parsed JSON.

    Raises:
        ValueError: the value is none of that type.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _record(hint, value)
    if origin is Literal and value in parts:
        return value
    if origin is UnionType:
        return decode(next((part for part in parts if _is(part, value)), parts[0]), value)
    if origin is dict and isinstance(value, dict):
        return {decode(parts[0], name): decode(parts[1], one) for name, one in value.items()}
    if origin is tuple and isinstance(value, list):
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(decode(part, one) for part, one in zip(hints, value, strict=True))
    if origin is None and _is(hint, value):
        return value
    raise ValueError(f"{value!r} is no {hint}")


def _is(hint: Any, value: Any) -> bool:
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is (NoneType if hint is None else hint)  # True is no int here


def _record(kind: Any, value: Any) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(value, dict) or set(value) != set(hints):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return kind(**{name: decode(hint, value[name]) for name, hint in hints.items()})
