"""Requests in, chunks of text out: queue, prefill, rounds, reuse of prefixes.

Owns the block decoder and the tokens of its sequences. Refuses to know how lengths are chosen
(speculation.py) and how text is shown. One thread at a time.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ._core import MemoryUse, SamplingConfig, Verdict
from .errors import BusyError, ContextFullError, DecodeError
from .interrupts import Uninterrupted
from .loading import Identity, Loaded, load
from .lookup import LookupDrafter
from .pressure import Action, Limits
from .prompt import ChatTemplate
from .recorder import RoundRecorder
from .sampling import sampling_config
from .sequence import Chunk, Request, SamplingParams, Stats, TokenLogprob
from .slots import Slot, SlotTable, n_common
from .speculation import Mode
from .stream import Stream
from .text import TextStream
from .trace import TraceEvent, TraceHeader, TraceWriter

if TYPE_CHECKING:
    from llama_cpp import Llama

PREFILL_CHUNK_BUSY = 128  # tokens evaluated between two rounds of running requests
DEFAULT_LIMITS = Limits()


class Engine:
    """Runs one target, with speculation where it pays.

    target: "default", a GGUF file, or a llama_cpp.Llama whose model is then shared (it must stay
    open). drafter: "auto", a GGUF file, "lookup", or None. n_ctx: tokens one sequence can hold.
    n_seq: requests that run at the same time; more wait. n_gpu_layers: -1 for all. n_threads: None
    for the physical cores. speculation: "auto" drafts where it pays, "always" in every round
    (verify_len draft tokens, None for whole blocks), "off" never. cost_cache: folder for the
    measured cost tables; None for the user's cache folder. limits: when the machine counts as short
    of memory, cool air or time, and what is then given up; None: pressure is not watched.

    Raises ModelError, PairError (an explicit drafter that does not fit), ValueError.
    """

    def __init__(
        self,
        target: str | Path | Llama = "default",
        *,
        drafter: str | Path | None = "auto",
        n_ctx: int = 4096,
        n_seq: int = 4,
        n_gpu_layers: int = -1,
        n_threads: int | None = None,
        speculation: Mode = "auto",
        verify_len: int | None = None,
        cost_cache: Path | None = None,
        limits: Limits | None = DEFAULT_LIMITS,
    ) -> None:
        loaded = load(
            target,
            drafter=drafter,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_gpu_layers=n_gpu_layers,
            n_threads=n_threads,
            speculation=speculation,
            verify_len=verify_len,
            cost_cache=cost_cache,
            limits=limits,
        )
        self._set_up(loaded)

    @classmethod
    def from_loaded(cls, loaded: Loaded) -> Engine:
        """An engine on what `loading.load` gave, or on a stand-in for it."""
        engine = cls.__new__(cls)
        engine._set_up(loaded)
        return engine

    def _set_up(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._decoder = loaded.decoder
        self._speculation = loaded.speculation
        self._governor = loaded.governor
        self._n_ctx = loaded.decoder.n_ctx
        self._n_batch = loaded.decoder.n_batch
        self._end_tokens = frozenset(loaded.decoder.eog_tokens)
        self._bytes_of = cache(loaded.decoder.token_bytes)
        self._template: ChatTemplate | None = None
        self._slots = SlotTable(loaded.decoder.n_seq)
        self._queue: deque[Request] = deque()
        self._outbox: deque[Chunk] = deque()  # of requests that step() speaks for
        self._streams: dict[int, deque[Chunk]] = {}  # of those that an iterator speaks for
        self._ended_streams: list[int] = []
        self._to_abort: deque[int] = deque()  # for the next boundary between rounds
        self._ids = itertools.count()
        self._unfinished: set[int] = set()  # ids of queued and running requests
        self._rounds = threading.Lock()  # held by the thread that runs a round
        self._state = threading.Lock()  # held by it too, and shortly by those that abort or add
        self._is_closed = False
        self._trace: TraceWriter | None = None

    # ------------------------------------------------------------ what is loaded

    @property
    def target_name(self) -> str:
        """The target's name, as its file or its metadata give it."""
        return self._loaded.target_name

    @property
    def drafter_name(self) -> str:
        """The drafter's file name, "lookup", or "none"."""
        return self._loaded.drafter_name

    @property
    def identity(self) -> Identity:
        """Which files are loaded: what a saved cache is good for."""
        return self._loaded.identity

    @property
    def device_name(self) -> str:
        """What the target runs on, e.g. "CPU, 2 threads"."""
        return self._loaded.device_name

    @property
    def notices(self) -> list[str]:
        """What the user should know about loading, e.g. why a drafter is not used."""
        return self._loaded.notices

    @property
    def speculation_state(self) -> str:
        """State of speculation and the reason, in words."""
        return self._speculation.reason

    @property
    def speculation_mode(self) -> Mode:
        """The mode in force: "auto", "always" or "off"."""
        return self._speculation.mode

    def set_speculation(self, mode: Mode) -> None:
        """Switches a live engine to another mode, from the next round on; no text changes.

        "off" leaves the drafter in memory. Raises ValueError for what was not prepared at load:
        drafting after speculation="off" or without a proposer, "auto" after "always".
        """
        with self._state:
            self._speculation.switch(mode)

    @property
    def pressure(self) -> tuple[Action, ...]:
        """What is given up now because the machine is short of something, and why."""
        return self._governor.in_force if self._governor is not None else ()

    def take_pressure_news(self) -> list[str]:
        """What was given up and taken back since the last call, a line each."""
        return self._governor.take_news() if self._governor is not None else []

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) per draft position, given that the positions before were right."""
        return self._speculation.acceptance_by_position

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self._n_ctx

    def trace_to(self, path: str | Path) -> None:
        """Writes one JSON line for each round from now on; `bench explain` renders it.

        Raises ValueError when the file cannot be written.
        """
        trace = TraceWriter(path)
        self.stop_trace()
        self._trace = trace
        self._speculation.recorder = RoundRecorder()
        self._trace.write(
            TraceHeader(
                target=self.target_name,
                drafter=self.drafter_name,
                n_ctx=self._n_ctx,
                n_seq=self._decoder.n_seq,
                block=self._speculation.n_proposed_max,
                mode=self._speculation.mode,
                cost=self._speculation.cost.to_json(),
            )
        )

    def stop_trace(self) -> None:
        """Ends the trace, if there is one, and closes its file."""
        if self._trace is not None:
            self._trace.close()
        self._trace = self._speculation.recorder = None

    def memory_use(self) -> MemoryUse:
        """Bytes that llama.cpp has allocated for weights, caches and compute buffers."""
        return self._decoder.memory_use()

    # ------------------------------------------------------------ text and tokens

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; control tokens written out in it become those tokens.

        Raises ValueError when the text is not Unicode (lone surrogates).
        """
        try:
            return self._decoder.tokenize(text.encode("utf-8"), add_special)
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not Unicode: {error}") from error

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token of this model; control tokens have none."""
        return self._bytes_of(token)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt text of a conversation, by the model's own chat template.

        Raises ValueError (bad messages) and ModelError (the model has no template).
        """
        if self._template is None:
            self._template = ChatTemplate(
                self._decoder.metadata("tokenizer.chat_template"),
                bos=self._special_text(self._decoder.bos_token),
                eos=self._special_text(self._decoder.eos_token),
            )
        return self._template.render(messages)

    def _special_text(self, token: int) -> str:
        if token < 0:
            return ""
        return self._decoder.token_bytes(token, special=True).decode("utf-8", errors="replace")

    # ------------------------------------------------------------ caches as bytes

    def save_cache(self, tokens: Sequence[int]) -> bytes:
        """The caches, the drafter's too, of the idle conversation that begins like these tokens.

        b"" when none does. Raises DecodeError (also while another thread runs a round), and
        MemoryError.
        """
        with Uninterrupted(), self._alone():
            self._refuse_if_closed()
            slot = self._slots.holding(tokens)
            return self._decoder.save_sequence(slot.seq_id) if slot is not None else b""

    def load_cache(self, blob: bytes) -> int:
        """Puts what `save_cache` gave into a free sequence, for the next request to find.

        Returns the number of its tokens. Raises ValueError when it is damaged or does not belong to
        what is loaded, or no sequence is free, and DecodeError.
        """
        with Uninterrupted(), self._alone():
            self._refuse_if_closed()
            slot = self._slots.spare()
            if slot is None:
                raise ValueError("every sequence runs a request; wait for one, or raise n_seq")
            self._decoder.open_sequence(slot.seq_id, SamplingConfig())
            try:
                tokens = self._decoder.restore_sequence(slot.seq_id, blob)
            except DecodeError:
                slot.cached.clear()
                raise
            self._slots.restore(slot, tokens)
            return len(tokens)

    # ------------------------------------------------------------ requests

    def chat(
        self, messages: Sequence[Mapping[str, object]], params: SamplingParams | None = None
    ) -> Stream:
        """Streams the reply to a conversation. Raises as `add` and `render` do."""
        # The template writes the beginning-of-sequence token itself where the model wants one.
        prompt = self.tokenize(self.render(messages), add_special=False)
        return self.generate(prompt, params)

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Streams the continuation of a text or of token ids.

        Other requests go on meanwhile; closing the iterator aborts this one. Raises as `add` does,
        and DecodeError when the request fails on the way.
        """
        request = self._request(prompt, params)
        chunks = self._streams[request.id] = deque()  # before another thread can run it
        self._enqueue(request)
        return Stream(chunks, work=self._work, end=partial(self._end_stream, request.id))

    def _end_stream(self, request_id: int) -> None:
        # Possibly called by the garbage collector, in the middle of a round.
        self._ended_streams.append(request_id)
        self._streams.pop(request_id, None)
        if not self._is_closed and self._state.acquire(blocking=False):
            try:
                self._carry_out_aborts()
            finally:
                self._state.release()

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError when a parameter is out of range, or a grammar does not parse."""
        self._decoder.check_sampling(sampling_config(params, seed=0, end_tokens=self._end_tokens))

    def add(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a request and returns its id; `step` runs it. Another thread may be running one.

        Raises ContextFullError when the prompt does not fit, ValueError for an empty prompt, bad
        token ids or parameters out of range, and BusyError while pressure lets only conversations
        go on that the engine knows.
        """
        request = self._request(prompt, params)
        self._enqueue(request)
        return request.id

    def _request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request:
        params = params or SamplingParams()
        if isinstance(prompt, bytes):
            raise ValueError("the prompt is bytes; give a str or a list of token ids")
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else [index(t) for t in prompt]
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"prompt has {len(tokens)} tokens but the context holds {self.n_ctx}; "
                f"pass a larger n_ctx or shorten it"
            )
        bad = next((t for t in tokens if not 0 <= t < self._decoder.n_vocab), None)
        if bad is not None:
            raise ValueError(
                f"token id is {bad}; this model has ids 0 to {self._decoder.n_vocab - 1}"
            )
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        request = Request(
            id=next(self._ids),
            tokens=tokens,
            params=params,
            end_tokens=frozenset() if params.ignore_eos else self._end_tokens,
            stats=Stats(seed=seed, n_prompt=len(tokens)),
            text=TextStream(params.stop),
            started_s=time.perf_counter(),
            lookup=LookupDrafter() if self._speculation.looks_up else None,
        )
        self._decoder.check_sampling(self._sampling_of(request))
        self._refuse_if_busy(tokens)
        return request

    def _refuse_if_busy(self, tokens: Sequence[int]) -> None:
        if self._governor is None:
            return
        if self._state.acquire(blocking=False):  # otherwise a round runs, which looks by itself
            try:
                self._look()
            finally:
                self._state.release()
        retry_s = self._governor.retry_s()
        if retry_s is not None and not self._slots.is_known(tokens):
            reason = next((a.reason for a in self.pressure if a.kind == "refuse"), "pressure")
            raise BusyError(
                f"{reason}: new requests are refused; try again in {retry_s} s, or go on with a "
                "running conversation",
                retry_s=retry_s,
            )

    def _enqueue(self, request: Request) -> None:
        self._unfinished.add(request.id)
        self._queue.append(request)

    def abort(self, request_id: int) -> bool:
        """Ends a request; its work stops before the next round. False when it had ended already.

        While another thread runs a round, that thread's next `step` ends it.
        """
        with Uninterrupted():
            if not self._state.acquire(blocking=False):
                self._to_abort.append(request_id)
                return request_id in self._unfinished
            try:
                return self._abort(request_id)
            finally:
                self._state.release()

    def _abort(self, request_id: int) -> bool:
        for request in self._queue.copy():  # other threads may add to it
            if request.id == request_id:
                self._queue.remove(request)
                self._unfinished.discard(request_id)
                request.finish_reason = "abort"
                self._emit(request, "", ())
                return True
        for slot, request in self._slots.running:
            if request.id == request_id:
                request.finish_reason = "abort"
                self._emit(request, request.text.flush(), ())
                self._release(slot, request)
                return True
        return False

    def _carry_out_aborts(self) -> None:
        """What other threads asked for, and streams that are gone: those say nothing any more."""
        while self._to_abort:
            self._abort(self._to_abort.popleft())
        while self._ended_streams:
            request_id = self._ended_streams.pop()
            self._streams[request_id] = deque()
            self._abort(request_id)
            del self._streams[request_id]

    def step(self) -> list[Chunk]:
        """Admits what fits, evaluates at most one chunk of a prompt, runs one round.

        Returns the chunks that came out of it, and those of requests aborted since the last call;
        what belongs to an iterator of `generate` waits there. An empty list with nothing left to do
        when `is_idle`.
        """
        self._work()
        # Another thread's abort may add to it meanwhile.
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._unfinished

    def close(self) -> None:
        """Frees the models; queued and running requests end without a chunk."""
        self._is_closed = True
        self._queue.clear()
        self._unfinished.clear()
        self._slots = SlotTable(0)
        self._decoder.close()
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ work

    def _work(self) -> None:
        # A pass and what it gained belong together: Ctrl-C waits for the end of the round.
        with Uninterrupted(), self._alone():
            self._refuse_if_closed()
            self._carry_out_aborts()
            self._look()
            try:
                self._admit()
                self._prefill_one()
                self._round()
            except BaseException:
                self._resync()
                raise

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed; make a new one")

    def _look(self) -> None:
        """Acts on pressure where that is due. Idle caches and the drafter may go, no request."""
        if self._governor is None:
            return
        for text in self._governor.look(self._slots, len(self._queue)):
            if self._trace is not None:
                self._trace.write(TraceEvent(event="pressure", t_s=self._trace.t_s, text=text))

    def _resync(self) -> None:
        """Cuts caches to what is recorded: something broke in between."""
        for slot, request in self._slots.running:
            n_known = min(n_common(slot.cached, request.tokens), request.n_past)
            n_keep = min(n_known, self._decoder.n_past(slot.seq_id))
            del slot.cached[self._decoder.rewind(slot.seq_id, n_keep) :]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._rounds.acquire(blocking=False):
            raise DecodeError("the engine is in use by another thread; take turns")
        try:
            with self._state:
                yield
        finally:
            self._rounds.release()

    def _admit(self) -> None:
        while self._queue and self._slots.has_free():
            request = self._queue.popleft()
            slot, n_keep = self._slots.admit(request)
            self._decoder.open_sequence(slot.seq_id, self._sampling_of(request))
            del slot.cached[self._decoder.rewind(slot.seq_id, n_keep) :]
            request.stats.n_reused = len(slot.cached)

    def _prefill_one(self) -> None:
        running = self._slots.running
        waiting = [(s, r) for s, r in running if len(s.cached) < r.n_past]
        if not waiting:
            return
        slot, request = waiting[0]
        is_alone = len(running) == len(waiting)
        n_chunk = self._n_batch if is_alone else PREFILL_CHUNK_BUSY
        begin = len(slot.cached)
        tokens = request.tokens[begin : min(begin + n_chunk, request.n_past)]
        start = time.perf_counter()
        try:
            self._decoder.prefill(slot.seq_id, tokens)
        except DecodeError as error:
            self._fail(slot, request, str(error))
            return
        slot.cached += tokens
        request.stats.prefill_s += time.perf_counter() - start

    def _round(self) -> None:
        running = [(s, r) for s, r in self._slots.running if len(s.cached) == r.n_past]
        if not running:
            return
        start, in_llama = time.perf_counter(), self._decoder.decode_s
        requests = [request for _, request in running]
        depth = max([len(slot.cached) for slot, _ in running])
        n_batch = self._n_batch
        if self._governor is not None:
            n_batch = self._governor.max_batch_tokens(len(requests), n_batch)
        drafts = self._speculation.plan(requests, self._n_ctx, n_batch)
        verify_tokens = [[r.tokens[-1], *draft] for r, draft in zip(requests, drafts, strict=True)]
        verify_start = time.perf_counter()
        verdicts = self._verify(running, verify_tokens)
        verify_s = time.perf_counter() - verify_start
        for (slot, request), tokens, verdict in zip(running, verify_tokens, verdicts, strict=True):
            if verdict is not None:
                self._commit(slot, request, tokens, verdict)
        round_s = time.perf_counter() - start
        own_s = round_s - (self._decoder.decode_s - in_llama)
        for request in requests:
            request.stats.decode_s += round_s
            request.stats.own_s += own_s
        batch_tokens = sum(map(len, verify_tokens))
        self._speculation.observe_round(batch_tokens, depth, verify_s, own_s)
        if self._trace is not None and self._speculation.recorder is not None:
            self._speculation.recorder.write(
                self._trace,
                depth=depth,
                state=self._speculation.reason,
                batch_tokens=batch_tokens,
                verify_s=verify_s,
                own_s=own_s,
            )

    def _verify(
        self, running: Sequence[tuple[Slot, Request]], verify_tokens: Sequence[list[int]]
    ) -> list[Verdict | None]:
        """One pass for all; when that fails, one for each, so that only the culprit ends.

        Then verify_tokens are cut to what was evaluated: the anchors.
        """
        try:
            return list(self._decoder.verify([slot.seq_id for slot, _ in running], verify_tokens))
        except DecodeError as error:
            for tokens in verify_tokens:
                del tokens[1:]
            return [
                self._verify_alone(slot, request, tokens[0], str(error))
                for (slot, request), tokens in zip(running, verify_tokens, strict=True)
            ]

    def _verify_alone(
        self, slot: Slot, request: Request, anchor: int, error_of_all: str
    ) -> Verdict | None:
        if self._decoder.n_past(slot.seq_id) < len(slot.cached):
            # The failed pass had to empty it: evaluate its tokens again. Prompts come back one per
            # step, so of several suspects only the culprit is in a failing pass a second time.
            if request.is_suspect:
                self._fail(slot, request, error_of_all)
                return None
            slot.cached.clear()
            request.is_suspect = True
            return None
        try:
            return self._decoder.verify([slot.seq_id], [[anchor]])[0]
        except DecodeError as error:
            self._fail(slot, request, str(error))
            return None

    def _commit(
        self, slot: Slot, request: Request, verify_tokens: Sequence[int], verdict: Verdict
    ) -> None:
        position, emitted, stats = len(request.tokens), verdict.tokens, request.stats
        text, n_taken = request.take(emitted, self._bytes_of, self._n_ctx)
        request.is_suspect = False
        stats.n_rounds += 1
        stats.n_verified += len(verify_tokens) - 1  # without the anchor
        n_accepted = min(verdict.n_accepted, n_taken)
        stats.n_accepted += n_accepted
        stats.min_margin = min([stats.min_margin, *verdict.margins[:n_taken]])
        if stats.ttft_s == 0.0:
            stats.ttft_s = time.perf_counter() - request.started_s
        slot.cached += verify_tokens[: 1 + verdict.n_accepted]
        self._speculation.learn(request, position, emitted[:n_taken])
        if self._speculation.recorder is not None:
            self._speculation.recorder.gain(
                request, position, emitted[:n_taken], verify_tokens, n_accepted
            )
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.params.logprobs is not None:
            logprobs = tuple(
                TokenLogprob(*listed[0], top=tuple(listed[1:]))
                for listed in verdict.logprobs[:n_taken]
            )
        if n_taken:
            self._emit(request, text, emitted[:n_taken], n_accepted, logprobs)
        if request.finish_reason is not None:
            self._release(slot, request)
        elif verdict.error:
            self._fail(slot, request, verdict.error)

    def _emit(
        self,
        request: Request,
        text: str,
        token_ids: Sequence[int],
        n_accepted: int = 0,
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str = "",
    ) -> None:
        self._streams.get(request.id, self._outbox).append(
            Chunk(
                request_id=request.id,
                text=text,
                token_ids=tuple(token_ids),
                finish_reason=request.finish_reason,
                stats=request.stats,
                n_accepted=n_accepted,
                logprobs=logprobs,
                error=error,
            )
        )

    def _fail(self, slot: Slot, request: Request, error: str) -> None:
        request.finish_reason = "error"
        self._emit(request, request.text.flush(), (), error=error)
        self._release(slot, request)

    def _release(self, slot: Slot, request: Request) -> None:
        """Frees a slot; its cache keeps exactly the tokens of the text, for the next turn."""
        self._slots.release(slot)
        self._unfinished.discard(request.id)
        self._speculation.finish(request)
        request.stats.speculation = self._speculation.reason
        n_cached = self._decoder.n_past(slot.seq_id)
        n_keep = self._decoder.rewind(slot.seq_id, min(n_cached, request.n_past))
        # After a failed pass that emptied the sequence nothing is left of it.
        del slot.cached[n_keep:]

    def _sampling_of(self, request: Request) -> SamplingConfig:
        return sampling_config(request.params, seed=request.stats.seed, end_tokens=self._end_tokens)
