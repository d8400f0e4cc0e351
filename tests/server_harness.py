"""A server for tests: in this process on a real socket, or as a process of its own.

Owns starting and stopping. Engines are real ones on tiny files, or scripted ones that say what a
test wants to hear.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from fake_decoder import FakeDecoder, Script, engine_on
from fastapi import FastAPI
from tiny_models import token_id

from dspark_edge import Engine
from dspark_edge.loading import Progress
from dspark_edge.server.app import STATIC_FOLDER, create_app
from dspark_edge.server.catalogue import FolderCatalogue
from dspark_edge.server.connection import ServerConfig
from dspark_edge.server.engine_making import MakeEngine, make_engine
from dspark_edge.server.hub import ModelHub
from dspark_edge.server.jobs import MEMORY_PARTS
from dspark_edge.server.lifecycle import listen, url_of
from dspark_edge.server.settings import EngineOptions, Settings

WAIT_S = 120.0  # the machine may stand still for a while
DRAIN_S = 5.0
TINY = EngineOptions(n_ctx=512, n_seq=4, n_threads=1, drafter=None)


@dataclass(slots=True)
class Running:
    """A server in this process."""

    url: str
    app: FastAPI

    @property
    def hub(self) -> ModelHub:
        hub: ModelHub = self.app.state.hub
        return hub

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S, trust_env=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        with self.client(**headers) as client:
            return client.post(path, json=body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        with self.client(**headers) as client:
            return client.get(path)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)


@contextmanager
def running(
    settings: Settings,
    make: MakeEngine = make_engine,
    *,
    static: Path = STATIC_FOLDER,
    send_bytes: int | None = None,
) -> Iterator[Running]:
    """A server in a thread of this process; the model loads with the first request.

    send_bytes: what the system keeps of an answer that the client does not take; None: its own.
    """
    catalogue = FolderCatalogue(settings.model, settings.models_dirs)
    app = create_app(settings, catalogue, make=make, static=static)
    listening = listen("127.0.0.1", 0)
    if send_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)  # connections inherit
    server = uvicorn.Server(ServerConfig(app, settings))
    url = url_of(listening)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield Running(url, app)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def tiny_settings(model: Path, **fields: Any) -> Settings:
    return replace(Settings(model=str(model), engine=TINY, drain_s=DRAIN_S), **fields)


class ScriptedDecoder(FakeDecoder):
    """A fake whose prompts are tokens of the tiny files' vocabulary."""

    def memory_use(self) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(MEMORY_PARTS, 0))


def scripted(script: Script, **fields: Any) -> MakeEngine:
    """Engines that say what the script says."""

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        end = token_id("<|eos|>")
        return engine_on(ScriptedDecoder(script, n_vocab=1000, eog_tokens=[end], **fields))

    return make


def answering(text: str) -> Script:
    """A target that answers every conversation of the tiny template with one text."""
    assistant, reply = token_id("<|assistant|>"), [*text.encode(), token_id("<|eos|>")]

    def script(before: Sequence[int]) -> int:
        begin = len(before) - list(before)[::-1].index(assistant)
        return reply[min(len(before) - begin, len(reply) - 1)]

    return script


@dataclass(slots=True)
class Child:
    """A server process."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    def end(self, number: int = signal.SIGTERM) -> str:
        """Ends the process in an orderly way and gives its whole log."""
        self.process.send_signal(number)
        assert self.process.wait(WAIT_S) == 0
        return self.whole_log()

    def whole_log(self) -> str:
        """All that a process which has ended has logged."""
        assert self.reader is not None
        self.reader.join(WAIT_S)
        return "".join(self.log)

    def wait_ready(self) -> None:
        pause = threading.Event()
        with self.client() as client:
            while client.get("/health").json()["status"] == "loading":
                pause.wait(0.05)


def start_child(*args: str, prefix: Sequence[str] = ()) -> Child:
    """Starts python -m dspark_edge.server on any port and waits for its ready line."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "dspark_edge.server", "--port", "0", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        raise AssertionError(f"no ready line: {process.stderr.read()}")
    ready = json.loads(line)
    child = Child(process, ready["url"])
    child.reader = threading.Thread(target=_collect, args=(child,), daemon=True)
    child.reader.start()
    return child


def _collect(child: Child) -> None:
    assert child.process.stderr is not None
    for line in child.process.stderr:
        child.log.append(line)


@contextmanager
def child(*args: str, prefix: Sequence[str] = ()) -> Iterator[Child]:
    """A server process that is killed in the end, if it still runs."""
    started = start_child(*args, prefix=prefix)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(WAIT_S)
