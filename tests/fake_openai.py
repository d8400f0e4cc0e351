"""A server with OpenAI's API for one process: streams what a function says, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from serving import listening


@dataclass(slots=True)
class FakeOpenAI:
    """says: pieces of the reply to a message. usage, timings: told at the end, unless empty."""

    says: Callable[[str], list[str]]
    url: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # sent in the stream instead of a reply
    status: int = 200
    is_json: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def serve(says: Callable[[str], list[str]]) -> Iterator[FakeOpenAI]:
    """Serves until the block ends."""
    fake = FakeOpenAI(says)

    class Handler(_Handler):
        state: ClassVar[FakeOpenAI] = fake

    with listening(Handler) as address:
        fake.url = f"{address}/v1"
        yield fake


class _Handler(BaseHTTPRequestHandler):
    state: ClassVar[FakeOpenAI]

    def do_GET(self) -> None:
        self._start(200)
        self.wfile.write(json.dumps({"data": [{"id": "a-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.state.bodies.append(body)
        self.state.keys.append(self.headers.get("Authorization"))
        self._start(self.state.status)
        if self.state.status != 200:
            self.wfile.write(b'{"error": {"message": "not today"}}')
            return
        if not self.state.is_json:
            self.wfile.write(b"data: <html>\n\n")
            return
        if self.state.error:
            self._event({"error": {"message": self.state.error}})
            return
        self._event({"choices": [{"delta": {"role": "assistant"}}]})
        for piece in self.state.says(body["messages"][0]["content"]):
            self._event({"choices": [{"delta": {"content": piece}}]})
        self._event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if self.state.timings:
            self._event({"choices": [], "timings": self.state.timings})
        if self.state.usage:
            self._event({"choices": [], "usage": self.state.usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _start(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        pass
