"""A Hugging Face hub for one process: repositories as dictionaries, over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from serving import listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class Hub:
    """repos: files by repository. ranges: what each download asked for. cut_after: bytes after
    which the next download breaks off, once. corrupt: serve other bytes than those stated. storage:
    the address of another server that has the files. authorizations: what came with downloads."""

    repos: Mapping[str, Mapping[str, bytes]]
    endpoint: str = ""
    ranges: list[str] = field(default_factory=list)
    cut_after: int | None = None
    corrupt: bool = False
    storage: str = ""
    authorizations: list[str | None] = field(default_factory=list)


@contextmanager
def serve(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serves the repositories until the block ends."""
    hub = Hub(repos)

    class Handler(_Handler):
        state: ClassVar[Hub] = hub

    with listening(Handler) as address:
        hub.endpoint = address
        yield hub


class _Handler(BaseHTTPRequestHandler):
    state: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        listing = re.match(r"/api/models/([^/]+/[^/]+)/tree/main", self.path)
        if listing:
            self._list(listing[1])
        else:
            self._file(with_body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _list(self, repo: str) -> None:
        if repo not in self.state.repos:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        items = [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": "0" * 40,
                "lfs": {"oid": _sha(content), "size": len(content), "pointerSize": 130},
            }
            for name, content in self.state.repos[repo].items()
        ]
        self._answer(200, json.dumps(items).encode(), {"Content-Type": "application/json"})

    def _file(self, *, with_body: bool) -> None:
        match = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)$", self.path)
        content = self.state.repos.get(match[1], {}).get(match[2]) if match else None
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_sha(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not with_body and self.state.storage:
            headers["X-Linked-Etag"], headers["X-Linked-Size"] = headers["ETag"], str(len(content))
            headers["Location"] = self.state.storage + self.path
            self._answer(302, b"", headers)
            return
        if not with_body:
            self._answer(200, content, headers, with_body=False)
            return
        self.state.authorizations.append(self.headers.get("Authorization"))
        if self.state.corrupt:
            content = bytes(len(content))
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.state.ranges.append(self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut, self.state.cut_after = self.state.cut_after, None
        self._answer(206 if asked else 200, content[start:], headers, cut=cut)

    def _answer(
        self,
        code: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        with_body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
