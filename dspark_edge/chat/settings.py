"""/set: which settings there are, and a typed text to a setting's value.

Refuses to know who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..sequence import SamplingParams

NONE = ("none", "off", "-")


def _optional(text: str) -> int | None:
    return None if text.lower() in NONE else int(text)


def _stops(text: str) -> tuple[str, ...]:
    return () if text.lower() in NONE else (text.replace("\\n", "\n"),)


SETTINGS: dict[str, tuple[Callable[[str], object], str]] = {
    "temperature": (float, "a number from 0"),
    "top_k": (int, "a whole number, 0 for off"),
    "top_p": (float, "a number up to 1, 1 for off"),
    "min_p": (float, "a number from 0 to 1, 0 for off"),
    "repeat_penalty": (float, "a number, 1 for off"),
    "frequency_penalty": (float, "a number, 0 for off"),
    "presence_penalty": (float, "a number, 0 for off"),
    "seed": (_optional, "a whole number, or none for a new one each time"),
    "max_tokens": (_optional, "a whole number, or none"),
    "stop": (_stops, "a text to stop at, or none"),
}


def shown(params: SamplingParams) -> list[str]:
    """All settings, a line each."""
    return [f"{name} = {_value(getattr(params, name))}" for name in SETTINGS]


def _value(value: object) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def changed(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """The parameters with one setting changed. Raises ValueError: no such setting, a bad value."""
    if name not in SETTINGS:
        raise ValueError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
    read, what = SETTINGS[name]
    try:
        value = read(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; it must be {what}") from error
    return replace(params, **{name: value})  # type: ignore[arg-type]
