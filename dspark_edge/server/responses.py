"""Answers that have a fixed form, for the OpenAPI document.

Refuses to know replies: their form depends on what was asked.
"""

from __future__ import annotations

from pydantic import BaseModel


class Tokens(BaseModel):
    """The answer of /tokenize."""

    tokens: list[int]


class Content(BaseModel):
    """The answer of /detokenize."""

    content: str


class Prompt(BaseModel):
    """The answer of /apply-template."""

    prompt: str


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail
