"""How strictly bodies are read: numbers within their ranges, no unknown fields, and one error each.

A body of a million mistakes must not cost more than one of one. Refuses to know which fields there
are (schemas.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..checked_json import is_number
from ..sequence import MAX_COUNT

Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
T = TypeVar("T")
# The first error ends the check: a body of a million wrong items would give a million errors, and
# they take minutes and gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]


def _first_wrong(is_good: Callable[[Any], bool]) -> BeforeValidator:
    """Makes of a dictionary with wrong values one that has only the first of them."""

    def keep(given: object) -> object:
        if not isinstance(given, dict):
            return given
        wrong = next((key for key, value in given.items() if not is_good(value)), None)
        return given if wrong is None else {wrong: given[wrong]}

    return BeforeValidator(keep)


Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
Biases = Annotated[
    dict[str, Bias] | None, _first_wrong(lambda value: is_number(value) and abs(value) <= 100.0)
]
Variables = Annotated[
    dict[str, str | int | float | bool | None] | None,
    _first_wrong(lambda value: value is None or isinstance(value, str | int | float)),
]


class Strict(BaseModel):
    """A body, or a part of one, that has the listed fields only, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: object) -> object:
        """Of the fields that are not known one is enough, for the same reason."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((key for key in given if key not in names), None)
        kept = {key: value for key, value in given.items() if key in names}
        return kept if unknown is None else {**kept, unknown: given[unknown]}
