"""A stand-in for llama-server: its flags, /health, /completion with timings, and its early death.

What it says is in a file beside it; what it was asked goes to another one. Knows no models.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

TOKEN_MS = 20.0  # what its timings tell of each token after the first
PROMPT_MS = 7.0


@dataclass(slots=True)
class FakeLlamaServer:
    """The executable and its files. says: token ids by prompt; a prompt that isn't there: 500."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "llama-server"

    def asked(self) -> list[dict[str, Any]]:
        """One row for each start and each request, of all processes, in order."""
        return [json.loads(line) for line in (self.folder / "asked").read_text().splitlines()]


def install(folder: Path, says: Mapping[tuple[int, ...], Sequence[int]]) -> FakeLlamaServer:
    """Writes an executable that answers so."""
    fake = FakeLlamaServer(folder)
    said = [[list(prompt), list(reply)] for prompt, reply in says.items()]
    (folder / "says").write_text(json.dumps(said))
    (folder / "asked").write_text("")
    fake.path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from fake_llama_server import main\nmain({str(folder)!r}, sys.argv[1:])\n"
    )
    fake.path.chmod(stat.S_IRWXU)
    return fake


def main(folder: str, argv: list[str]) -> None:
    if argv == ["--version"]:
        print("version: 7 (fake)", file=sys.stderr)
        return
    parser = argparse.ArgumentParser()
    for flag in ("-m", "-md", "-c", "-np", "-t", "-tb", "--host", "--spec-type"):
        parser.add_argument(flag)
    parser.add_argument("--no-ui", action="store_true", required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--spec-draft-n-max", type=int)
    args = parser.parse_args(argv)
    _note(folder, {"pid": os.getpid(), "flags": argv})
    if "dies" in str(args.m):
        sys.exit("cannot load this model")

    class Handler(_Handler):
        state = (Path(folder), args)

    HTTPServer((args.host, args.port), Handler).serve_forever()


def _note(folder: str | Path, row: dict[str, Any]) -> None:
    with (Path(folder) / "asked").open("a") as file:
        file.write(json.dumps(row) + "\n")


class _Handler(BaseHTTPRequestHandler):
    state: tuple[Path, argparse.Namespace]
    n_health = 0

    def do_GET(self) -> None:
        _Handler.n_health += 1  # still loading when it is asked for the first time
        self._answer(503 if _Handler.n_health == 1 else 200, {"status": "ok"})

    def do_POST(self) -> None:
        folder, args = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _note(folder, {"path": self.path, "body": body, "spec": args.spec_type})
        says = {tuple(p): r for p, r in json.loads((folder / "says").read_text())}
        reply = says.get(tuple(body["prompt"]))
        if reply is None:
            self._answer(500, {"error": "no such prompt"})
            return
        reply = reply[: body["n_predict"]]
        n_decoded = len(reply) - 1
        timings = {"prompt_ms": PROMPT_MS, "predicted_n": len(reply)}
        timings["predicted_ms"] = TOKEN_MS * n_decoded
        if args.spec_type == "draft-dspark":
            timings |= {"draft_n": 3 * n_decoded, "draft_n_accepted": n_decoded // 2}
        text = bytes(t for t in reply if t < 256).decode("utf-8", errors="replace")
        self._answer(200, {"content": text, "tokens": reply, "timings": timings})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass
