"""One HTTP request that generates: a lease, jobs for the engine, and their pieces as a response.

Owns cancelling: when the client goes away, its jobs end before the next round. Refuses to know how
prompts are made and what replies look like.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..sequence import SamplingParams
from .errors import ApiError, as_api_error
from .hub import ModelHub, Served
from .jobs import Job, Piece
from .log import log_failure, logger
from .metrics import Totals

T = TypeVar("T")
STATUS_GONE = 499  # nobody reads it; the log does


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Reply(Protocol):
    """A reply's own form: what a stream says of each piece, and the whole in the end."""

    def push(self, index: int, piece: Piece) -> dict[str, Any] | None: ...
    def is_over(self, index: int) -> bool: ...
    def last_events(self) -> list[dict[str, Any]]: ...
    def whole(self) -> dict[str, Any]: ...


@dataclass(slots=True, frozen=True)
class Plan:
    """The jobs of a request, and the form of its reply."""

    jobs: Sequence[tuple[Sequence[int], SamplingParams]]
    reply: Reply


@dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    """What a request wants. plan: makes prompts and parameters; it runs in a worker thread."""

    model: str | None
    n_jobs: int
    streams: bool
    user: str | None
    plan: Callable[[Served], Plan]


class Answers:
    """Answers requests that generate."""

    def __init__(self, hub: ModelHub, totals: Totals, *, log_content: bool = False) -> None:
        self._hub = hub
        self._totals = totals
        self._log_content = log_content

    async def answer(self, request: Request, asked: Asked) -> Response:
        """The response: a JSON object, or a stream of events. Raises ApiError."""
        answer = _Answer(self._hub, self._totals, asked, log_content=self._log_content)
        try:
            await _unless_gone(request.receive, answer.begin())
            if asked.streams:
                return EventStream(answer)
            body = await _unless_gone(request.receive, answer.whole())
        except ClientGoneError:
            await answer.close("cancelled")
            return Response(status_code=STATUS_GONE)
        except asyncio.CancelledError as error:
            await answer.close("503")
            raise _cut_short() from error
        except BaseException as error:
            await answer.close(str(as_api_error(error).status))
            raise
        await answer.close("ok")
        return JSONResponse(body)


class _Answer:
    """One request under way."""

    def __init__(self, hub: ModelHub, totals: Totals, asked: Asked, *, log_content: bool) -> None:
        self._log_content = log_content
        self._hub = hub
        self._totals = totals
        self._asked = asked
        self._stack = AsyncExitStack()
        self._start_s = time.monotonic()
        self._jobs: list[Job] = []
        self._served: Served | None = None
        self._reply: Reply | None = None
        self._is_closed = False

    async def begin(self) -> None:
        """Waits for the model, makes the prompts and hands the jobs over."""
        lease = self._hub.lease(self._asked.model, self._asked.n_jobs)
        served = self._served = await self._stack.enter_async_context(lease)
        plan = await asyncio.to_thread(self._asked.plan, served)
        self._reply = plan.reply
        pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for i, (tokens, params) in enumerate(plan.jobs):
            job = Job(tokens, params, i, pieces, loop.create_future())
            self._jobs.append(job)
            served.thread.submit(job)
        for job in self._jobs:
            await job.accepted

    async def whole(self) -> dict[str, Any]:
        """The complete reply."""
        reply = self._begun()
        async for index, piece in self._pieces():
            reply.push(index, piece)
        return reply.whole()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The reply as a stream's objects. Raises ApiError where it breaks."""
        reply = self._begun()
        async for index, piece in self._pieces():
            event = reply.push(index, piece)
            if event is not None:
                yield event
        for event in reply.last_events():
            yield event

    async def close(self, outcome: str) -> None:
        """Ends what still runs and gives the lease back."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._served is not None:
            for job in self._jobs:
                job.accepted.cancel()
                self._served.thread.cancel(job)
        await self._stack.aclose()
        took_s = time.monotonic() - self._start_s
        self._totals.observe_end(outcome, took_s)
        self._log(outcome, took_s)

    def _log(self, outcome: str, took_s: float) -> None:
        stats = [job.stats for job in self._jobs if job.stats is not None]
        logger.info(
            "%s: %d prompt tokens, %d reused, %d emitted, %.2f s%s",
            outcome,
            sum(s.n_prompt for s in stats),
            sum(s.n_reused for s in stats),
            sum(s.n_tokens for s in stats),
            took_s,
            f", user {ascii(self._asked.user)[:80]}" if self._asked.user else "",
        )
        if self._log_content and self._served is not None and self._reply is not None:
            vocabulary = self._served.text.vocabulary
            prompts = [vocabulary.text_of(list(job.tokens)) for job in self._jobs]
            logger.info("prompts %r, reply %r", prompts, self._reply.whole()["choices"])

    def _begun(self) -> Reply:
        if self._reply is None:
            raise RuntimeError("the answer was not begun")
        return self._reply

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all jobs until each has ended."""
        reply, served = self._begun(), self._served
        waiting = {job.index: job for job in self._jobs}
        fresh = set(waiting)
        while waiting:
            index, piece = await self._jobs[0].pieces.get()
            if index not in waiting:
                continue
            if piece.error:
                raise ApiError(500, f"decoding failed: {piece.error}", code="decode_error")
            if index in fresh and piece.token_ids:
                fresh.discard(index)
                self._totals.observe_prompt(piece)
            yield index, piece
            if piece.finish_reason is not None:
                del waiting[index]
            elif reply.is_over(index) and served is not None:
                served.thread.cancel(waiting.pop(index))


class EventStream(Response):
    """Server-sent events. What breaks it becomes its last event."""

    media_type = "text/event-stream"

    def __init__(self, answer: _Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await _unless_gone(receive, self._send(send))
        except ClientGoneError:
            pass
        except asyncio.CancelledError:
            self._outcome = "503"
            await self._end(send, _cut_short().body())
        finally:
            await self._answer.close(self._outcome)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

        try:
            async for event in self._answer.events():
                text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
                data = f"data: {text}\n\n".encode()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            told = as_api_error(error)
            if told.code == "bug":
                log_failure("a stream broke", error)
            self._outcome = str(told.status)
            await self._end(send, told.body())
            return
        await self._end(send, "[DONE]")
        self._outcome = "ok"

    async def _end(self, send: Send, last: str | dict[str, Any]) -> None:
        data = last if isinstance(last, str) else json.dumps(last)
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode()})


def _cut_short() -> ApiError:
    """What a client is told whose reply takes longer than the server waits before it leaves."""
    return ApiError(
        503, "the server is leaving and cut this reply short; ask again later", code="shutting_down"
    )


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns. When the client goes first, the work is cancelled: ClientGoneError."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
