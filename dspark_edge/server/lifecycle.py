"""From start to exit: the socket, the ready line, SIGTERM, and the parent's death.

Refuses to know what is served.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI

from ..errors import DsparkError
from .connection import ServerConfig
from .hub import ModelHub
from .log import logger
from .settings import Settings

PARENT_POLL_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 128


class AddressError(DsparkError):
    """The address that was asked for cannot be listened on."""


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address. Raises AddressError: in use, not ours, not allowed."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    # So that a server which was killed can come back while old connections linger. Elsewhere than
    # on POSIX the option would let two servers share a port.
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise AddressError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            "pass another --port, or 0 for any"
        ) from error
    listening.setblocking(False)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if listening.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Parent:
    """The process that has started us, by its pid."""

    def __init__(self, pid: int) -> None:
        """Raises AddressError when there is no such process."""
        try:
            self._process = psutil.Process(pid)
        except psutil.Error as error:
            raise AddressError(f"there is no parent process {pid}; check --parent-pid") from error

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a number that is in use again does not count."""
        try:
            is_zombie = self._process.status() == psutil.STATUS_ZOMBIE
            return self._process.is_running() and not is_zombie
        except psutil.Error:
            return False


class Server(uvicorn.Server):
    """uvicorn's server, with an exit of our own: signals drain and then end with exit code 0."""

    def __init__(self, config: uvicorn.Config, hub: ModelHub) -> None:
        super().__init__(config)
        self._hub = hub
        self.why = ""  # it ends

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals begin the exit; unlike uvicorn's, they are not raised again afterwards."""
        before = {number: signal.signal(number, self._drain) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _drain(self, number: int, frame: FrameType | None) -> None:
        # The second one is meant: leave at once.
        self.force_exit = self.should_exit
        self.end(signal.Signals(number).name)

    def end(self, why: str) -> None:
        """Lets what runs finish, then leaves. Says nothing yet: a signal may have come amid a
        line of the log."""
        self.why = self.why or why
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn's loop once should_exit is set."""
        n_running = self._hub.n_requests
        logger.info(
            "%s: no new requests are taken; %d may go on for %s s",
            *(self.why, n_running, self.config.timeout_graceful_shutdown),
        )
        await super().shutdown(sockets)
        if self.force_exit:
            logger.warning("a second signal: left without waiting")
        else:
            logger.info("the server has ended")


async def serve(app: FastAPI, settings: Settings, listening: socket.socket) -> bool:
    """Serves until a signal or the parent's death. False when the model could not be loaded."""
    parent = Parent(settings.parent_pid) if settings.parent_pid is not None else None
    hub: ModelHub = app.state.hub
    server = Server(ServerConfig(app, settings), hub)
    tasks = [asyncio.create_task(_announce(server, listening))]
    if parent is not None:
        tasks.append(asyncio.create_task(_watch(parent, server)))
    loading = asyncio.create_task(_preload(hub.preload(), server))
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in (*tasks, loading):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return not loading.done() or loading.cancelled() or loading.result()


async def _announce(server: Server, listening: socket.socket) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    line = json.dumps({"url": url_of(listening), "pid": os.getpid()})
    print(line, flush=True)
    logger.info("listening on %s", url_of(listening))


async def _watch(parent: Parent, server: Server) -> None:
    while parent.is_alive:
        await asyncio.sleep(PARENT_POLL_S)
    server.end("the parent process has ended")


async def _preload(loading: Coroutine[Any, Any, None], server: Server) -> bool:
    """Loads the model given at the start; without it there is nothing to serve."""
    try:
        await loading
    except Exception as error:
        if server.should_exit:  # then it was given up
            return True
        print(f"error: {error}", file=sys.stderr, flush=True)
        server.end("there is no model to serve")
        return False
    return True
