"""JSON over HTTP for bench compare and server: whole answers, and streams of events.

Refuses to know what is asked.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any

TIMEOUT_S = 600.0  # without a byte
SAID_CHARS = 300  # of an error's answer


class HttpClient:
    """Requests to one address. Proxies are left out: what is measured is the program."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: the part before the paths. api_key: sent as a bearer token."""
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The JSON object that is there. Raises OSError, ValueError."""
        return self._object(path, b"".join(self._lines(path, None, timeout_s)))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer, a JSON object. Raises OSError, ValueError."""
        return self._object(path, b"".join(self._lines(path, body, TIMEOUT_S)))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer as they come. Raises OSError, ValueError."""
        for line in self._lines(path, body, TIMEOUT_S):
            field, _, data = line.partition(b":")
            if field == b"data" and data.strip() != b"[DONE]":
                yield self._object(path, data)

    def _object(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            said = data[:SAID_CHARS].decode("utf-8", errors="replace")
            raise ValueError(f"{self.url}{path} answered no JSON object: {said!r}")
        return found

    def _lines(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Iterator[bytes]:
        url = self.url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                yield from answer
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", errors="replace")
            said = " ".join(said.split())[:SAID_CHARS]
            raise OSError(f"{url} answered {error.code}: {said}") from error
        except (OSError, HTTPException) as error:
            raise OSError(f"{url} gave no answer: {error}") from error
