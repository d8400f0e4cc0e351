"""The engine: requests in, chunks of text out.

Owns who may do what when: one thread at a time runs rounds, others may add and abort meanwhile.
Refuses to know how a request is made (intake.py), run (rounds.py) and spoken for (outbox.py); what
an engine tells of itself is in engine_state.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ._core import SamplingConfig
from .engine_state import EngineState
from .errors import BusyError, DecodeError
from .intake import Intake
from .interrupts import Uninterrupted
from .loading import Loaded, load
from .outbox import Outbox
from .pressure import Limits
from .recorder import RoundRecorder
from .rounds import Rounds
from .sequence import Chunk, Request, SamplingParams
from .speculation import Mode
from .stream import Stream
from .trace import TraceWriter
from .turns import Turns

if TYPE_CHECKING:
    from llama_cpp import Llama

DEFAULT_LIMITS = Limits()


class Engine(EngineState):
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
        super().__init__(loaded)
        self._intake = Intake(loaded.decoder, loaded.speculation)
        self._outbox = Outbox()
        self._rounds = Rounds(loaded, self._intake, self._outbox)
        self._turns = Turns()
        self._to_abort: deque[int] = deque()  # for the next boundary between rounds

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
        chunks = self._outbox.open_stream(request.id)  # before another thread can run it
        self._rounds.add(request)
        return Stream(chunks, work=self._work, end=partial(self._end_stream, request.id))

    def add(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a request and returns its id; `step` runs it. Another thread may be running one.

        Raises ContextFullError when the prompt does not fit, ValueError for an empty prompt, bad
        token ids or parameters out of range, and BusyError while pressure lets only conversations
        go on that the engine knows.
        """
        request = self._request(prompt, params)
        self._rounds.add(request)
        return request.id

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError when a parameter is out of range, or a grammar does not parse."""
        self._refuse_if_closed()
        self._intake.sampling(params)

    def step(self) -> list[Chunk]:
        """Admits what fits, evaluates at most one chunk of a prompt, runs one round.

        Returns the chunks that came out of it, and those of requests aborted since the last call;
        what belongs to an iterator of `generate` waits there. An empty list with nothing left to do
        when `is_idle`.
        """
        self._work()
        return self._outbox.take()

    def abort(self, request_id: int) -> bool:
        """Ends a request; its work stops before the next round. False when it had ended already.

        While another thread runs a round, that thread's next `step` ends it.
        """
        with Uninterrupted(), self._turns.if_between_rounds() as is_between:
            if is_between:
                return self._rounds.abort(request_id)
            self._to_abort.append(request_id)
            return self._rounds.is_unfinished(request_id)

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return self._is_closed or self._rounds.is_idle

    def close(self) -> None:
        """Frees the models; queued and running requests end without a chunk.

        Waits for the end of the round that another thread runs. Later calls raise ValueError, but
        for those to close it again, to abort, and to ask how things are.
        """
        self._is_closed = True  # before waiting, so that no other round begins
        with self._turns.after_the_round():
            self._rounds.forget()
            self._decoder.close()
            self._end_trace()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ text and tokens

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; control tokens written out in it become those tokens.

        Raises ValueError when the text is not Unicode (lone surrogates).
        """
        self._refuse_if_closed()
        return self._intake.tokenize(text, add_special=add_special)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token of this model; control tokens have none."""
        self._refuse_if_closed()
        return self._intake.token_bytes(token)

    def is_end(self, token: int) -> bool:
        """Whether a token is one of those with which this model ends a reply."""
        return self._intake.is_end(token)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt text of a conversation, by the model's own chat template.

        Raises ValueError (bad messages) and ModelError (the model has no template).
        """
        self._refuse_if_closed()
        return self._intake.render(messages)

    # ------------------------------------------------------------ caches as bytes

    def save_cache(self, tokens: Sequence[int]) -> bytes:
        """The caches, the drafter's too, of the idle conversation that begins like these tokens.

        b"" when none does. Raises DecodeError (also while another thread runs a round), and
        MemoryError.
        """
        with Uninterrupted(), self._turns.alone():
            self._refuse_if_closed()
            slot = self._rounds.slots.holding(tokens)
            return self._decoder.save_sequence(slot.seq_id) if slot is not None else b""

    def load_cache(self, blob: bytes) -> int:
        """Puts what `save_cache` gave into a free sequence, for the next request to find.

        Returns the number of its tokens. Raises ValueError when it is damaged or does not belong to
        what is loaded, or no sequence is free, and DecodeError.
        """
        with Uninterrupted(), self._turns.alone():
            self._refuse_if_closed()
            slots = self._rounds.slots
            slot = slots.spare()
            if slot is None:
                raise ValueError("every sequence runs a request; wait for one, or raise n_seq")
            self._decoder.open_sequence(slot.seq_id, SamplingConfig())
            try:
                tokens = self._decoder.restore_sequence(slot.seq_id, blob)
            except DecodeError:
                slot.cached.clear()
                raise
            slots.restore(slot, tokens)
            return len(tokens)

    # ------------------------------------------------------------ switches

    def set_speculation(self, mode: Mode) -> None:
        """Switches a live engine to another mode, from the next round on; no text changes.

        "off" leaves the drafter in memory. Raises ValueError for what was not prepared at load:
        drafting after speculation="off" or without a proposer, "auto" after "always".
        """
        with self._turns.after_the_round():
            self._refuse_if_closed()
            self._speculation.switch(mode)

    def trace_to(self, path: str | Path) -> None:
        """Writes one JSON line for each round from now on; `bench explain` renders it.

        Raises ValueError when the file cannot be written.
        """
        with self._turns.after_the_round():
            self._refuse_if_closed()
            trace = TraceWriter(path)
            self._end_trace()
            trace.write(self._trace_header())
            self._rounds.trace, self._speculation.recorder = trace, RoundRecorder()

    def stop_trace(self) -> None:
        """Ends the trace, if there is one, and closes its file."""
        with self._turns.after_the_round():
            self._end_trace()

    def _end_trace(self) -> None:
        if self._rounds.trace is not None:
            self._rounds.trace.close()
        self._rounds.trace = self._speculation.recorder = None

    # ------------------------------------------------------------ turns

    def _request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request:
        self._refuse_if_closed()
        request = self._intake.request(prompt, params)
        self._refuse_if_busy(request.tokens)
        return request

    def _refuse_if_busy(self, tokens: Sequence[int]) -> None:
        if self._governor is None:
            return
        with self._turns.if_between_rounds() as is_between:
            # Otherwise a round runs, which looks by itself, or another thread closes.
            if is_between and not self._is_closed:
                self._rounds.look()
        retry_s = self._governor.retry_s()
        if retry_s is not None and not self._rounds.slots.is_known(tokens):
            reason = next((a.reason for a in self.pressure if a.kind == "refuse"), "pressure")
            raise BusyError(
                f"{reason}: new requests are refused; try again in {retry_s} s, or go on with a "
                "running conversation",
                retry_s=retry_s,
            )

    def _work(self) -> None:
        # A pass and what it gained belong together: Ctrl-C waits for the end of the round.
        with Uninterrupted(), self._turns.alone():
            self._refuse_if_closed()
            self._carry_out_aborts()
            self._rounds.run()

    def _end_stream(self, request_id: int) -> None:
        # Possibly called by the garbage collector, in the middle of a round.
        self._outbox.close_stream(request_id)
        with self._turns.if_between_rounds() as is_between:
            if is_between:
                self._carry_out_aborts()

    def _carry_out_aborts(self) -> None:
        """What other threads asked for, and streams that are gone."""
        while self._to_abort:
            self._rounds.abort(self._to_abort.popleft())
        for request_id in self._outbox.silence_gone():
            self._rounds.abort(request_id)
