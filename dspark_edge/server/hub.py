"""Which model is in memory: loads on demand, switches, unloads when idle, and counts who is in.

A request holds a lease on the model that it uses; a model with leases stays. Refuses to know what
requests ask of it, and what is read of a file without loading it (model_text.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..errors import DsparkError
from .catalogue import Catalogue, Entry
from .engine_making import MakeEngine, make_engine
from .engine_thread import EngineThread
from .errors import ApiError, refused
from .jobs import Snapshot
from .log import log_failure, logger
from .metrics import Totals
from .model_text import ModelText, ModelTexts
from .settings import Settings

FIRST_GUESS_S = 5.0  # of how long a request takes, before one has ended

State = Literal["unloaded", "loading", "ready", "failed"]


@dataclass(slots=True, eq=False)
class _Loading:
    """A model on its way into memory. share: of its weights that have been read, 0..1."""

    entry: Entry
    since_s: float
    share: float = 0.0


@dataclass(slots=True, eq=False)
class Served:
    """A model in memory."""

    entry: Entry
    text: ModelText
    thread: EngineThread
    n_leases: int = 0


class ModelHub:
    """One model at a time. All methods belong to the event loop."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        totals: Totals,
        make: MakeEngine = make_engine,
    ) -> None:
        self.catalogue = catalogue
        self._settings = settings
        self._totals = totals
        self._make = make
        self._turn = asyncio.Lock()  # in the order of arrival, so a switch cannot starve
        self._served: Served | None = None
        self._change: asyncio.Task[None] | None = None  # a load or unload under way
        self._left = asyncio.Event()  # set when a lease ends
        self._unload_timer: asyncio.TimerHandle | None = None
        self._texts = ModelTexts(settings.chat_template)
        self._is_starting = False  # the model of the start is wanted, and not there yet
        self._loading: _Loading | None = None
        self._is_closing = False
        self.failure = ""  # why the last load failed
        self._failed: Entry | None = None  # what it was
        self.n_requests = 0  # jobs under way or waiting
        totals.is_parked = self._is_parked

    # ------------------------------------------------------------ for requests

    @asynccontextmanager
    async def lease(self, name: str | None, n_jobs: int) -> AsyncIterator[Served]:
        """The model of a name, in memory for as long as the block lasts.

        Raises ApiError (404, 429, 503) when it cannot be had.
        """
        self._admit(n_jobs)
        try:
            async with self._turn:
                served = await self._serve(name)
                served.n_leases += 1
            self._keep_awake()
            try:
                yield served
            finally:
                served.n_leases -= 1
                self._left.set()
        finally:
            self.n_requests -= n_jobs
            self._plan_unload()

    async def text_of(self, name: str | None) -> ModelText:
        """The vocabulary and template of a model, in memory or not. Raises ApiError."""
        entry = await asyncio.to_thread(self.catalogue.find, name)
        return await self._texts.of(entry)

    def _admit(self, n_jobs: int) -> None:
        room = self._settings.engine.n_seq + self._settings.max_queue
        if n_jobs > room:  # waiting would not help
            raise refused(
                "n",
                f"{n_jobs} choices are more than the {room} that may run and wait here; "
                "ask for fewer, or start the server with a larger --max-queue",
            )
        if self.n_requests + n_jobs > room:
            raise ApiError(
                429,
                f"{self.n_requests} requests run or wait and the limit is {room}; "
                "try again later, or start the server with a larger --max-queue",
                code="queue_full",
                retry_s=self._wait_s(),
            )
        self.n_requests += n_jobs

    def _wait_s(self) -> float:
        """How long a new request would wait for its turn, in seconds, as far as can be told."""
        n_seq = self._settings.engine.n_seq
        mean_s = self._totals.mean_request_s(FIRST_GUESS_S)
        return max(self.n_requests - n_seq, 0) / n_seq * mean_s

    @property
    def n_jobs(self) -> int:
        """Jobs that the engine has got and that have not ended."""
        return self._served.thread.n_jobs if self._served is not None else 0

    @property
    def n_waiting(self) -> int:
        """Jobs beyond those that can run."""
        return max(self.n_requests - self._settings.engine.n_seq, 0)

    # ------------------------------------------------------------ state

    @property
    def state(self) -> State:
        """What a new request would find."""
        if self._loading is not None:
            return "loading"
        if self._served is not None and self._served.thread.is_alive:
            return "ready"
        if self._is_starting:
            return "loading"
        # Of another model the failure is told, and the next request may well be served.
        return "failed" if self._failed == self.catalogue.default else "unloaded"

    @property
    def model_id(self) -> str | None:
        """The model in memory or on its way there."""
        if self._loading is not None:
            return self._loading.entry.id
        if self._is_starting:
            return self.catalogue.default.id
        return self._served.entry.id if self._served is not None else None

    def progress(self) -> dict[str, float]:
        """How far loading is: the share of the weights that has been read, and seconds so far."""
        loading = self._loading
        if loading is not None:
            elapsed_s = round(time.monotonic() - loading.since_s, 2)
            return {"progress": round(loading.share, 3), "elapsed_s": elapsed_s}
        return {"progress": 0.0, "elapsed_s": 0.0} if self.state == "loading" else {}

    async def snapshot(self, timeout_s: float) -> Snapshot | None:
        """What the engine says of itself; None when there is none."""
        if self._served is None or not self._served.thread.is_alive:
            return None
        return await self._served.thread.refresh(timeout_s)

    @property
    def last_snapshot(self) -> Snapshot | None:
        """What the engine last said of itself, without asking it."""
        return self._served.thread.snapshot if self._served is not None else None

    def _is_parked(self) -> bool:
        snapshot = self.last_snapshot
        return snapshot is not None and snapshot.speculation.startswith("parked")

    # ------------------------------------------------------------ load, switch, unload

    def preload(self) -> Coroutine[Any, Any, None]:
        """Brings the default model into memory, once awaited; it counts as loading from now on.

        Raises as loading does.
        """
        self._is_starting = True
        return self._preload()

    async def _preload(self) -> None:
        try:
            async with self._turn:
                await self._serve(None)
        finally:
            self._is_starting = False
        self._plan_unload()

    async def close(self) -> None:
        """Frees everything; a load under way is given up."""
        self._is_closing = True
        self._keep_awake()
        if self._change is not None:
            await asyncio.wait({self._change})
        await self._unload("the server ends")

    async def _serve(self, name: str | None) -> Served:
        if self._change is not None:  # begun for a request that has gone meanwhile, or an unload
            await asyncio.wait({self._change})
        entry = await asyncio.to_thread(self.catalogue.find, name)
        if not self._has(entry):
            while self._served is not None and self._served.n_leases:
                self._left.clear()
                await self._left.wait()
            self._change = asyncio.create_task(self._load(entry))
            # Whoever waits may go away; the load goes on for the next one.
            await asyncio.shield(self._change)
        if self._served is None:
            raise ApiError(503, self.failure, code="model_failed", param="model")
        return self._served

    def _has(self, entry: Entry) -> bool:
        served = self._served
        return served is not None and served.entry == entry and served.thread.is_alive

    async def _load(self, entry: Entry) -> None:
        # Before the other model goes: there is no moment at which nothing seems to be under way.
        loading = self._loading = _Loading(entry, time.monotonic())
        self.failure, self._failed = "", None

        def note(share: float) -> bool:  # called in the engine's thread
            loading.share = share
            return not self._is_closing

        thread = EngineThread(
            partial(self._make, entry.path, self._settings.engine, note),
            observe=self._totals.observe_round,
            grammar_s=self._settings.limits.grammar_s,
        )
        try:
            await self._unload(f"{entry.id} takes its place")
            logger.info("model %s is being loaded", entry.id)
            text = await self._texts.of(entry)
            await thread.load()
            self._served = Served(entry, text, thread)
            took_s = time.monotonic() - loading.since_s
            logger.info("model %s is loaded after %.1f s", entry.id, took_s)
            for notice in thread.snapshot.notices if thread.snapshot else ():
                logger.info("%s", notice)
        except (ApiError, DsparkError, ValueError, OSError, MemoryError) as error:
            self.failure, self._failed = f"model {entry.id} cannot be loaded: {error}", entry
            logger.error("%s", self.failure)
        except Exception as error:
            self.failure = f"model {entry.id} cannot be loaded; the server's log has the place"
            self._failed = entry
            log_failure(f"model {entry.id} cannot be loaded", error)
        finally:
            self._loading = None
        self._plan_unload()  # whoever asked for it may have left meanwhile

    async def _unload(self, why: str) -> None:
        served, self._served = self._served, None
        if served is None:
            return
        if not served.thread.is_alive:
            why = "its engine has failed"
        await served.thread.stop()
        logger.info("model %s is unloaded: %s", served.entry.id, why)

    # ------------------------------------------------------------ idle

    def _keep_awake(self) -> None:
        if self._unload_timer is not None:
            self._unload_timer.cancel()
            self._unload_timer = None

    def _plan_unload(self) -> None:
        keep_alive_s = self._settings.keep_alive_s
        if keep_alive_s < 0 or self.n_requests or self._is_starting or self._served is None:
            return
        self._keep_awake()
        loop = asyncio.get_running_loop()
        self._unload_timer = loop.call_later(keep_alive_s, self._unload_if_idle)

    def _unload_if_idle(self) -> None:
        self._unload_timer = None
        is_free = self._change is None or self._change.done()
        if is_free and not self.n_requests and self._served is not None:
            why = f"idle for {self._settings.keep_alive_s:g} s"
            self._change = asyncio.create_task(self._unload(why))
