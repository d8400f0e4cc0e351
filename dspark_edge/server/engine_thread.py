"""The one thread that enters an engine: jobs in through a queue, pieces of text out to asyncio.

Owns the engine from load to close. An idle thread blocks, but for looks at the machine; a busy one
crosses to the event loop once a round. Refuses to know HTTP, prompts and what becomes of the text.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ..engine import Engine
from ..errors import DecodeError
from ..governor import LOOK_S
from ..sequence import Chunk
from .jobs import Job, Piece, Snapshot
from .log import log_failure, logger

STOPPED = "the engine has stopped; the request can be sent again"
SNAPSHOT_S = 0.5  # between two while rounds run


class EngineThread:
    """Runs one engine until it is stopped, or breaks. All methods belong to the event loop."""

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        observe: Callable[[Sequence[Piece]], None],
        grammar_s: float,
    ) -> None:
        """make: loads the engine, in the thread. observe: gets the pieces of every round, in the
        event loop. grammar_s: see Limits."""
        self._make = make
        self._observe = observe
        self._grammar_s = grammar_s
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # the thread's own
        self._waiting: set[Job] = set()  # the loop's own: jobs that have not ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self.snapshot: Snapshot | None = None

    # ------------------------------------------------------------ from the event loop

    async def load(self) -> None:
        """Starts the thread and waits until the engine is there. Raises what loading raised."""
        self._thread.start()
        await asyncio.shield(self._loaded)

    @property
    def is_alive(self) -> bool:
        """Whether jobs can be given to it."""
        return not self._ended.is_set()

    @property
    def n_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Hands over a job; it is admitted before the next round."""
        self._waiting.add(job)
        self._commands.put(partial(self._add, job))
        if not self.is_alive:
            self._lose()

    def cancel(self, job: Job) -> None:
        """Ends a job before the next round; nothing more comes from it."""
        if not job.has_ended:
            job.has_ended = True
            self._waiting.discard(job)
            self._commands.put(partial(self._abort, job))

    async def refresh(self, timeout_s: float) -> Snapshot | None:
        """A new snapshot, or the last one when the engine is busy for longer than the timeout."""
        taken: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(partial(self._take_snapshot, taken))
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(taken, timeout_s)
        return self.snapshot

    async def stop(self) -> None:
        """Ends all jobs, closes the engine and waits for the thread."""
        self._commands.put(None)
        await self._ended.wait()
        await asyncio.to_thread(self._thread.join)

    def _deliver(self, pieces: Sequence[tuple[Job, Piece]]) -> None:
        self._observe([piece for _, piece in pieces])
        for job, piece in pieces:
            if job.has_ended:
                continue
            job.pieces.put_nowait((job.index, piece))
            if piece.finish_reason is not None:
                job.has_ended = True
                self._waiting.discard(job)

    def _answer(self, job: Job, error: BaseException | None) -> None:
        if error is not None:
            job.has_ended = True
            self._waiting.discard(job)
        if not job.accepted.done():
            _settle(job.accepted, error)

    def _end(self, error: BaseException | None) -> None:
        if not self._loaded.done():
            _settle(self._loaded, error or DecodeError(STOPPED))
        elif error is not None:
            log_failure("the engine failed and is closed", error)
        self._ended.set()
        self._lose()

    def _lose(self) -> None:
        """Nobody works on these jobs any more: say so to whoever waits for them."""
        for job in list(self._waiting):
            self._answer(job, DecodeError(STOPPED))
            job.pieces.put_nowait((job.index, job.broken(STOPPED)))

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            engine = self._make()
            try:
                self.snapshot = Snapshot.of(engine)
                self._post(partial(_settle, self._loaded, None))
                self._serve(engine)
            finally:
                engine.close()
        except Exception as caught:
            error = caught
        self._post(partial(self._end, error))

    def _serve(self, engine: Engine) -> None:
        next_snapshot_s = 0.0
        while self._obey(engine):
            is_idle = engine.is_idle  # then a step is only a look at the machine
            cpu_s = time.thread_time()
            pieces = [
                self._piece(self._jobs[chunk.request_id], chunk)
                for chunk in engine.step()
                if chunk.request_id in self._jobs
            ]
            if time.thread_time() - cpu_s > self._grammar_s:
                pieces += self._end_slow_grammars(engine, pieces)
            if pieces:
                self._post(partial(self._deliver, pieces))
            now_s = time.monotonic()
            if is_idle or now_s > next_snapshot_s:
                self.snapshot = Snapshot.of(engine)
                for line in engine.take_pressure_news():
                    logger.warning("%s", line)
                next_snapshot_s = now_s + SNAPSHOT_S

    def _obey(self, engine: Engine) -> bool:
        """Carries out what waits; with nothing else to do, waits for it until a look is due.

        False: stop.
        """
        look_s = time.monotonic() + LOOK_S
        while True:
            timeout_s = max(look_s - time.monotonic(), 0.0) if engine.is_idle else 0.0
            try:
                command = self._commands.get(timeout=timeout_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _add(self, job: Job, engine: Engine) -> None:
        try:
            job.id = engine.add(job.tokens, job.params)
        except Exception as error:  # the job's own fault, or no room: for its sender to read
            self._post(partial(self._answer, job, error))
            return
        self._jobs[job.id] = job
        self._post(partial(self._answer, job, None))

    def _abort(self, job: Job, engine: Engine) -> None:
        if self._jobs.pop(job.id, None) is not None:
            engine.abort(job.id)

    def _take_snapshot(self, taken: asyncio.Future[None], engine: Engine) -> None:
        self.snapshot = Snapshot.of(engine)
        self._post(partial(_settle, taken, None))

    def _piece(self, job: Job, chunk: Chunk) -> tuple[Job, Piece]:
        if chunk.finish_reason is not None:
            del self._jobs[job.id]
        return job, job.piece(chunk)

    def _end_slow_grammars(
        self, engine: Engine, told: Sequence[tuple[Job, Piece]]
    ) -> list[tuple[Job, Piece]]:
        """Ends the jobs whose grammars hold everybody up: the round just told took too long.

        own_s is wall time, which also grows while the whole process stands still; the caller has
        looked at the thread's own time.
        """
        ended: list[tuple[Job, Piece]] = []
        for job, piece in told:
            last_s = job.last_own_s
            if job.has_grammar and piece.finish_reason is None and last_s > self._grammar_s:
                self._abort(job, engine)
                error = f"the grammar took {last_s:.1f} s for one round; the limit is "
                ended.append((job, job.broken(f"{error}{self._grammar_s} s: make it simpler")))
        return ended

    def _post(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call)


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
