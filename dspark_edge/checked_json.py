"""Typed access to parsed JSON: the value under a key, or ValueError saying what it must be.

Refuses to know: what is read. Messages name the key; the caller adds the place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

COUNT_MAX = 2**63 - 1  # the core takes no more; seeds are as large


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; true and false are none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX


def json_object(value: object, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _take(data: dict[str, Any], key: str, is_good: Callable[[Any], bool], what: str) -> Any:
    if key not in data:
        raise ValueError(f"{key} is missing")
    if not is_good(data[key]):
        raise ValueError(f"{key} is {str(data[key])[:40]!r}; it must be {what}")
    return data[key]


def text(data: dict[str, Any], key: str) -> str:
    """Text."""
    return str(_take(data, key, lambda value: isinstance(value, str), "text"))


def one_of(data: dict[str, Any], key: str, names: tuple[str, ...]) -> str:
    """One of a few words."""
    return str(_take(data, key, lambda value: value in names, " or ".join(names)))


def flag(data: dict[str, Any], key: str) -> bool:
    """true or false."""
    return bool(_take(data, key, lambda value: isinstance(value, bool), "true or false"))


def count(data: dict[str, Any], key: str) -> int:
    """A whole number, at least 0."""
    return int(_take(data, key, _is_count, "a whole number, at least 0"))


def seconds(data: dict[str, Any], key: str) -> float:
    """A finite time, at least 0."""
    return float(_take(data, key, lambda v: is_number(v) and v >= 0, "a time in seconds"))


def array(data: dict[str, Any], key: str) -> list[Any]:
    """A list of anything."""
    return list(_take(data, key, lambda value: isinstance(value, list), "a list"))


def counts(data: dict[str, Any], key: str) -> list[int]:
    """A list of whole numbers, at least 0."""
    good = _take(data, key, lambda v: isinstance(v, list) and all(map(_is_count, v)), "token ids")
    return list(good)


def numbers(data: dict[str, Any], key: str) -> list[float]:
    """A list of finite numbers."""
    good = _take(data, key, lambda v: isinstance(v, list) and all(map(is_number, v)), "numbers")
    return [float(value) for value in good]
