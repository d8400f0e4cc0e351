"""Runs the requests: admits them, evaluates their prompts, drafts, verifies and commits.

Owns the queue, the sequences and the tokens in their caches. Refuses to know how lengths are chosen
(speculation.py), what is given up under pressure (governor.py), who gets a chunk (outbox.py), and
threads: the engine lets one in at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from ._core import Verdict
from .errors import DecodeError
from .intake import Intake
from .loading import Loaded
from .outbox import Outbox
from .sequence import FinishReason, Request, TokenLogprob
from .slots import Slot, SlotTable, n_common
from .trace import TraceEvent, TraceWriter

PREFILL_CHUNK_BUSY = 128  # tokens evaluated between two rounds of running requests


class Rounds:
    """All requests of an engine, and the slots they run on.

    Only `add`, `is_idle` and `is_unfinished` may be called while another thread runs a round.
    trace: where rounds and events are written; speculation.recorder collects them.
    """

    __slots__ = (
        "_decoder",
        "_governor",
        "_intake",
        "_n_batch",
        "_outbox",
        "_queue",
        "_speculation",
        "_unfinished",
        "slots",
        "trace",
    )

    def __init__(self, loaded: Loaded, intake: Intake, outbox: Outbox) -> None:
        self._decoder = loaded.decoder
        self._speculation = loaded.speculation
        self._governor = loaded.governor
        self._n_batch = loaded.decoder.n_batch
        self._intake = intake
        self._outbox = outbox
        self._queue: deque[Request] = deque()
        self._unfinished: set[int] = set()  # ids of queued and running requests
        self.slots = SlotTable(loaded.decoder.n_seq)
        self.trace: TraceWriter | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._unfinished

    def is_unfinished(self, request_id: int) -> bool:
        """Whether that request is queued or running."""
        return request_id in self._unfinished

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._unfinished.add(request.id)
        self._queue.append(request)

    def run(self) -> None:
        """Admits what fits, evaluates at most one chunk of a prompt, runs one round."""
        self.look()
        try:
            self._admit()
            self._prefill_one()
            self._round()
        except BaseException:
            self._resync()
            raise

    def look(self) -> None:
        """Acts on pressure where that is due. Idle caches and the drafter may go, no request."""
        if self._governor is None:
            return
        for text in self._governor.look(self.slots, len(self._queue)):
            if self.trace is not None:
                self.trace.write(TraceEvent(event="pressure", t_s=self.trace.t_s, text=text))

    def abort(self, request_id: int) -> bool:
        """Ends a request with a last chunk. False when it had ended already."""
        for request in self._queue.copy():  # other threads may add to it
            if request.id == request_id:
                self._end_queued(request, "abort")
                return True
        for slot, request in self.slots.running:
            if request.id == request_id:
                request.finish_reason = "abort"
                self._outbox.put(request, request.text.flush(), ())
                self._release(slot, request)
                return True
        return False

    def forget(self) -> None:
        """Drops all requests without a chunk: the decoder is about to be closed."""
        self._queue.clear()
        self._unfinished.clear()
        self.slots = SlotTable(0)

    # ------------------------------------------------------------ a round

    def _admit(self) -> None:
        while self._queue and self.slots.has_free():
            request = self._queue[0]
            slot, n_keep = self.slots.best(request)
            try:
                self._decoder.open_sequence(slot.seq_id, request.sampling)
                del slot.cached[self._decoder.rewind(slot.seq_id, n_keep) :]
            except Exception as error:  # whatever it is, the other requests go on
                slot.cached.clear()
                self._end_queued(request, "error", str(error) or type(error).__name__)
                continue
            request.stats.n_reused = len(slot.cached)
            self.slots.admit(slot, request)
            self._queue.popleft()

    def _prefill_one(self) -> None:
        running = self.slots.running
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
            will_draft = self._speculation.will_draft(len(running))
            self._decoder.prefill(slot.seq_id, tokens, will_draft)
        except DecodeError as error:
            self._fail(slot, request, str(error))
            return
        slot.cached += tokens
        request.stats.prefill_s += time.perf_counter() - start

    def _round(self) -> None:
        running = [(s, r) for s, r in self.slots.running if len(s.cached) == r.n_past]
        if not running:
            return
        start, in_llama = time.perf_counter(), self._decoder.decode_s
        requests = [request for _, request in running]
        depth = max([len(slot.cached) for slot, _ in running])
        drafts = self._speculation.plan(
            requests, self._intake.n_ctx, self._max_batch_tokens(len(requests))
        )
        verify_tokens = [[r.tokens[-1], *draft] for r, draft in zip(requests, drafts, strict=True)]
        verify_start, before_verify = time.perf_counter(), self._decoder.decode_s
        verdicts = self._verify(running, verify_tokens)
        verify_s = time.perf_counter() - verify_start
        pass_s = self._decoder.decode_s - before_verify
        for (slot, request), tokens, verdict in zip(running, verify_tokens, verdicts, strict=True):
            if verdict is not None:
                self._commit(slot, request, tokens, verdict)
        round_s = time.perf_counter() - start
        own_s = round_s - (self._decoder.decode_s - in_llama)
        for request in requests:
            request.stats.decode_s += round_s
            request.stats.own_s += own_s
        batch_tokens = sum(map(len, verify_tokens))
        self._speculation.observe_round(
            batch_tokens, depth, round_s=round_s, verify_s=verify_s, pass_s=pass_s
        )
        if self.trace is not None and self._speculation.recorder is not None:
            self._speculation.recorder.verify(verify_s, pass_s)
            self._speculation.recorder.write(
                self.trace,
                depth=depth,
                state=self._speculation.reason,
                batch_tokens=batch_tokens,
                round_s=round_s,
            )

    def _max_batch_tokens(self, n_seq: int) -> int:
        if self._governor is None:
            return self._n_batch
        return self._governor.max_batch_tokens(n_seq, self._n_batch)

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
        text, n_taken = request.take(emitted, self._intake.token_bytes, self._intake.n_ctx)
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
            self._outbox.put(request, text, emitted[:n_taken], n_accepted, logprobs)
        if request.finish_reason is not None:
            self._release(slot, request)
        elif verdict.error:
            self._fail(slot, request, verdict.error)

    # ------------------------------------------------------------ ends and failures

    def _end_queued(self, request: Request, reason: FinishReason, error: str = "") -> None:
        self._queue.remove(request)
        self._unfinished.discard(request.id)
        request.finish_reason = reason
        self._outbox.put(request, "", (), error=error)

    def _fail(self, slot: Slot, request: Request, error: str) -> None:
        request.finish_reason = "error"
        self._outbox.put(request, request.text.flush(), (), error=error)
        self._release(slot, request)

    def _release(self, slot: Slot, request: Request) -> None:
        """Frees a slot; its cache keeps exactly the tokens of the text, for the next turn."""
        self.slots.release(slot)
        self._unfinished.discard(request.id)
        self._speculation.finish(request)
        request.stats.speculation = self._speculation.reason
        n_cached = self._decoder.n_past(slot.seq_id)
        n_keep = self._decoder.rewind(slot.seq_id, min(n_cached, request.n_past))
        # After a failed pass that emptied the sequence nothing is left of it.
        del slot.cached[n_keep:]

    def _resync(self) -> None:
        """Cuts caches to what is recorded: something broke in between."""
        for slot, request in self.slots.running:
            n_known = min(n_common(slot.cached, request.tokens), request.n_past)
            n_keep = min(n_known, self._decoder.n_past(slot.seq_id))
            del slot.cached[self._decoder.rewind(slot.seq_id, n_keep) :]
