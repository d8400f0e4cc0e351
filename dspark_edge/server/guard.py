"""Who may talk to the server, and how much they may send: checked before anything is read.

A web page must not reach it: by DNS rebinding its Host is a foreign name, by a cross-site request
its Origin is. Refuses to know what a request wants.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .log import logger
from .settings import LOOPBACK_NAMES, Settings

STATIC = "/static"
OPEN_PATH = re.compile(rf"/|{STATIC}/.*")  # what needs no key: the page has no secrets in it


class HostGuard:
    """Lets in what is addressed to this server by a name of its own, from a page of its own."""

    def __init__(self, app: ASGIApp, settings: Settings, observe: Callable[[int], None]) -> None:
        """observe: gets the status of every answer."""
        self._app = app
        self._settings = settings
        self._observe = observe
        self._names = LOOPBACK_NAMES | {settings.host.lower()} | set(settings.allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s, status = time.monotonic(), 500  # what an app that says nothing has done

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, noting)
        except ApiError as error:
            await error.response()(scope, receive, noting)
        finally:
            self._observe(status)
            # A page or an app that asks how things are each second would fill the log; 503 is what
            # /health says while a model is loaded.
            is_dull = scope["method"] == "GET" and (status < 400 or status == 503)
            logger.log(
                logging.DEBUG if is_dull else logging.INFO,
                "%s %s %d %.3f s",
                scope["method"],
                ascii(scope["path"])[:200],
                status,
                time.monotonic() - start_s,
            )

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(host := hosts[0]):
            raise ApiError(
                403, "Host is not a name of this server; add it with --allow-host", code="bad_host"
            )
        for origin in headers.getlist("origin"):
            if origin not in (*self._settings.cors_origins, f"http://{host}", f"https://{host}"):
                raise ApiError(
                    403, "Origin is not allowed; add it with --cors-origin", code="bad_origin"
                )

    def _is_own(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname or "", parts.port
        except ValueError:
            return False
        if parts.netloc != host or "@" in host:
            return False
        if name in self._names:
            return True
        # Rebinding needs a name: an address cannot be made to point elsewhere.
        return not self._settings.is_loopback and _is_address(name)


class Gate:
    """Asks for the API key, and reads no more of a body than is allowed."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._key = settings.api_key
        self._body_bytes = settings.body_bytes
        self._body_s = settings.limits.body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body: Message | None = None

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message, body = body, None
            return message

        try:
            self._check(scope)
            body = await self._read(receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> Message:
        """The whole body as one message, or that the client has gone. Raises ApiError."""
        parts: list[bytes] = []
        n_bytes = 0
        until_s = time.monotonic() + self._body_s
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(until_s - time.monotonic(), 0.0))
            except asyncio.TimeoutError as error:
                limit = f"the body did not come within {self._body_s:g} s"
                raise ApiError(408, limit, code="timeout") from error
            if message["type"] == "http.disconnect":
                return message
            parts.append(message.get("body", b""))
            n_bytes += len(parts[-1])
            if n_bytes > self._body_bytes:
                raise _too_large(n_bytes, self._body_bytes)
            if not message.get("more_body", False):
                return {"type": "http.request", "body": b"".join(parts), "more_body": False}

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        path: str = scope["path"]
        if self._key is not None and not OPEN_PATH.fullmatch(path):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            # Bytes, because compare_digest takes no text that is not ASCII.
            is_same = hmac.compare_digest(key.strip().encode(), self._key.encode())
            if scheme.lower() != "bearer" or not is_same:
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._body_bytes:
            raise _too_large(int(length[:20]), self._body_bytes)


def _too_large(n_bytes: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {n_bytes} bytes or more; the limit is {limit}: "
        "shorten it, or start the server with a larger --ctx",
        code="body_too_large",
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
