"""One connection: uvicorn's HTTP, with an end to clients that neither send nor read.

Owns the times below ASGI: for a request's head, for what is left of a refused body, and for the
client to take what it was sent. Refuses to know requests; guard.py waits for their bodies.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .errors import ApiError
from .settings import Limits, Settings


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, and our limits."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",  # else they would pass by what guard.py checks
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=max(round(settings.drain_s), 1),
        )
        self.our_limits = settings.limits


class Connection(H11Protocol):
    """Closes itself when a head takes longer than head_s, or a write waits longer than write_s."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.our_limits if isinstance(config, ServerConfig) else Limits()
        self._late: asyncio.TimerHandle | None = None  # runs while the client owes us bytes
        self._stuck: asyncio.TimerHandle | None = None  # runs while it takes none

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio.Protocol."""
        super().connection_made(transport)
        # So that writing is paused for as long as anything at all waits to be taken.
        transport.set_write_buffer_limits(high=0)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol."""
        super().connection_lost(exc)
        self._stop_late()
        self._stop_stuck()

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """H11Protocol."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """asyncio.Protocol."""
        super().pause_writing()
        self._stuck = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """asyncio.Protocol."""
        super().resume_writing()
        self._stop_stuck()

    def _watch(self) -> None:
        """Sets the clock while a head is not complete, or a body comes that nobody waits for."""
        state = self.conn.their_state
        is_unread = state is h11.SEND_BODY and self.cycle.response_complete
        if self.transport.is_closing() or not (state is h11.IDLE or is_unread):
            self._stop_late()
        elif self._late is None:
            self._late = self.loop.call_later(self._limits.head_s, self._give_up)

    def _give_up(self) -> None:
        self._late = None
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            limit = f"the request's head did not come within {self._limits.head_s:g} s"
            self._refuse(ApiError(408, limit, code="timeout"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """H11Protocol: what came is no HTTP."""
        self._refuse(ApiError(400, "the request is not valid HTTP", code="bad_request"))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Sends the error, unless an answer has been begun."""
        is_free = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if not is_free or self.transport.is_closing():
            return
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _stop_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _stop_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
