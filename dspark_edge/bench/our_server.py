"""One of our own servers as a child process: its command line, state, caches and processor time.

Refuses to know clients and what is compared.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from ..speculation import Mode as Speculating
from .child import Child
from .http_client import HttpClient
from .modes import Setup

MAX_PARALLEL = 16  # choices of one request, by which all caches are taken over


def command_of(setup: Setup, speculation: Speculating, n_parallel: int) -> list[str]:
    """The command line; it leaves when this process ends."""
    command = [sys.executable, "-m", "dspark_edge.server", "--port", "0", "--keep-alive", "-1"]
    command += ["--parent-pid", str(os.getpid()), "--speculation", speculation]
    command += ["--model", setup.target, "--drafter", setup.drafter]
    command += ["--ctx", str(setup.n_ctx), "--parallel", str(n_parallel)]
    return command + ([] if setup.n_threads is None else ["--threads", str(setup.n_threads)])


class OurServer:
    """Serves until it is closed."""

    def __init__(self, name: str, command: Sequence[str], n_parallel: int) -> None:
        """name: of the mode. Raises OSError when the model does not load, ValueError."""
        self.name = name
        self.command = list(command)
        self._n_parallel = n_parallel
        self._child = Child(f"our server ({name})", command, tells=True)
        try:
            ready = json.loads(self._child.first_line())
            self.client = HttpClient(ready["url"])
            self._process = psutil.Process(ready["pid"])
            # Before loading begins it says "unloaded", with 200.
            self._child.await_health(self.client, "ready")
        except BaseException:  # Ctrl-C too: the process must not stay
            self.close()
            raise

    def health(self) -> dict[str, Any]:
        """Files, and speculation's state and reason. Raises OSError."""
        return self.client.get("/health")

    def cpu_s(self) -> float:
        """Processor time that it has used so far."""
        used = self._process.cpu_times()
        return float(used.user + used.system)

    def forget(self) -> None:
        """Takes earlier prompts out of every cache, so that a repeat evaluates its prompt again."""
        body = {"prompt": "x", "n": self._n_parallel, "max_tokens": 1, "temperature": 0.0}
        self.client.post("/v1/completions", body)

    def tokenize(self, text: str) -> list[int]:
        """Token ids, control tokens read as such."""
        tokens: list[int] = self.client.post("/tokenize", {"content": text})["tokens"]
        return tokens

    def lead(self, body: Mapping[str, Any], reply: Sequence[int]) -> float:
        """Lead in logits of the token after these, drawn again: noise belongs to positions.

        body: of the chat request.
        """
        told = self.client.post("/apply-template", {"messages": body["messages"]})
        again = {name: body[name] for name in ("temperature", "seed")}
        again |= {"prompt": [*self.tokenize(told["prompt"]), *reply], "max_tokens": 1}
        (stats,) = self.client.post("/v1/completions", again)["x_dspark"]["stats"]
        return float("inf") if stats["min_margin"] is None else float(stats["min_margin"])

    def close(self) -> None:
        """Ends the process."""
        self._child.close()
