"""Errors in OpenAI's form: what became of a request that is not answered.

Owns the mapping from this package's exceptions to statuses. A bug says nothing but that it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from ..errors import ContextFullError, DsparkError

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
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, DsparkError):
        return ApiError(503, str(error), code="model_error")
    return ApiError(500, "the server failed on this request; its log has the place", code="bug")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """422 that names the first parameter at fault; the value itself is not repeated."""
    first = errors[0]
    where = [str(part) for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        return ApiError(400, "the body is not JSON", code="json_invalid")
    name = ".".join(where) or "body"
    if first.get("type") == "extra_forbidden":
        message = f"{name}: this parameter is not known here, and would be ignored; leave it out"
        return ApiError(422, message, param=name, code="unknown_parameter")
    return ApiError(422, f"{name}: {first.get('msg', 'is wrong')}", param=name, code="invalid_type")


def _sendable(text: str) -> str:
    """Text that can be sent as UTF-8, of bounded length."""
    return text[:MAX_MESSAGE_LEN].encode("utf-8", errors="replace").decode("utf-8")
