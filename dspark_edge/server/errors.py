"""Errors in OpenAI's form: what became of a request that is not answered.

Owns the mapping from this package's exceptions to statuses. A bug says nothing but that it is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from ..errors import ContextFullError, DsparkError
from .schemas import ChatRequest, CompletionRequest

MAX_MESSAGE_LEN = 500
MAX_RETRY_S = 600
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
PARAMETERS = frozenset(ChatRequest.model_fields) | frozenset(CompletionRequest.model_fields)
BOUNDS = {  # of pydantic's errors: the code, the limit's name there, and in words
    "greater_than": ("below_min_value", "gt", "more than"),
    "greater_than_equal": ("below_min_value", "ge", "at least"),
    "less_than": ("above_max_value", "lt", "less than"),
    "less_than_equal": ("above_max_value", "le", "at most"),
}
CODES = {  # of pydantic's other errors, in OpenAI's words
    "missing": "missing_required_parameter",
    "missing_required_parameter": "missing_required_parameter",
    "unsupported_content": "unsupported_content",
    "too_short": "empty_array",
    "extra_forbidden": "unknown_parameter",
    "invalid_value": "invalid_value",
    "finite_number": "invalid_value",
    "literal_error": "invalid_value",
    "string_pattern_mismatch": "invalid_value",
    "union_tag_invalid": "invalid_value",
    "union_tag_not_found": "missing_required_parameter",
}


class ApiError(Exception):
    """A refusal with its HTTP status. param: the parameter at fault, in the request's words."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients expect."""
        return {
            "error": {
                "message": _sendable(self.message),
                "type": TYPES.get(self.status, "invalid_request_error"),
                "param": None if self.param is None else _sendable(self.param),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole response, Retry-After included."""
        headers = {}
        if self.retry_s is not None:
            headers["Retry-After"] = str(min(max(math.ceil(self.retry_s), 1), MAX_RETRY_S))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def refused(name: str, why: str) -> ApiError:
    """400 for one parameter, by name."""
    return ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception; anything unforeseen becomes a bare 500."""
    if isinstance(error, ApiError):
        return error
    retry_s = getattr(error, "retry_s", None)
    if isinstance(error, DsparkError) and isinstance(retry_s, int | float):
        return ApiError(429, str(error), code="busy", retry_s=retry_s)
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        first = re.split(r"\W", str(error), maxsplit=1)[0]  # our messages begin with the name
        param = first if first in PARAMETERS else None
        return ApiError(400, str(error), code="invalid_value", param=param)
    if isinstance(error, DsparkError):
        return ApiError(503, str(error), code="model_error")
    return ApiError(500, "the server failed on this request; its log has the place", code="bug")


def of_content_type(given: str | None) -> ApiError:
    """415 for a body that is not said to be JSON."""
    came = "none" if given is None else ascii(given)[:80]
    return ApiError(
        415,
        f"the body must come with the header Content-Type: application/json; it came with {came}",
        code="unsupported_media_type",
        param="Content-Type",
    )


def of_validation(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """422 that names a parameter at fault; no text of the request is repeated."""
    # Of the kinds that a value might have been, the deepest error tells what was meant, and one
    # about its range does.
    first = max(errors, key=lambda error: (len(error.get("loc", ())), error.get("type") in BOUNDS))
    kind, context = str(first.get("type")), first.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, "the body is not JSON", code="json_invalid")
    name = _parameter(first.get("loc", ()), body)
    what = name or "the body"
    code = CODES.get(kind, "invalid_type")
    message = f"{what}: {first.get('msg', 'is wrong')}"
    if kind == "extra_forbidden":
        message = f"{what}: this parameter is not known here, and would be ignored; leave it out"
    elif kind == "missing":
        message = f"{what} is missing"
    elif kind in BOUNDS and isinstance(first.get("input"), int | float):
        side, limit_name, words = BOUNDS[kind]
        limit = context.get(limit_name)
        code = f"{'decimal' if isinstance(limit, float) else 'integer'}_{side}"
        message = f"{what} is {first['input']!r:.40}; it must be {words} {limit}"
    return ApiError(422, message, param=name or None, code=code)


def _parameter(where: Sequence[str | int], body: object) -> str:
    """A place in a request as OpenAI writes it, e.g. messages[0].content; "" for the whole.

    where: pydantic's place, which also names the kinds of a union that were tried.
    """
    name, at = "", body
    for i, part in enumerate(where[1:] if where[:1] == ("body",) else where):
        if isinstance(part, int) and isinstance(at, list):
            name, at = f"{name}[{part}]", at[part] if part < len(at) else None
        elif isinstance(at, dict) and (part in at or i == len(where) - 2):
            name, at = f"{name}.{part}" if name else str(part), at.get(part)
    return name


def _sendable(text: str) -> str:
    """Text that can be sent as UTF-8, of bounded length."""
    return text[:MAX_MESSAGE_LEN].encode("utf-8", errors="replace").decode("utf-8")
