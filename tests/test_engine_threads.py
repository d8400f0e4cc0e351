"""The engine in several threads: one runs rounds, others add, abort, ask and close meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_decoder import FakeDecoder, FixedCost, engine_on, letters, oracle

from dspark_edge import Chunk, DecodeError, Engine, SamplingParams
from dspark_edge.outbox import Outbox
from dspark_edge.trace import read_trace

PROMPT = list(b"a prompt of some length")
BLOCKED_S = 0.2  # how long a call that must wait is given to come through all the same


def continuation(prompt: Sequence[int], n: int) -> list[int]:
    return oracle(letters)(prompt, n)


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, seed=1)


def ids_of(chunks: Sequence[Chunk], request_id: int) -> list[int]:
    return [token for c in chunks if c.request_id == request_id for token in c.token_ids]


def drain(engine: Engine) -> list[Chunk]:
    """Steps to the end of all work."""
    chunks: list[Chunk] = []
    for _ in range(5000):
        if engine.is_idle:
            return chunks
        chunks += engine.step()
    raise AssertionError("the engine does not come to an end")


def in_another_thread(call: Callable[[], object]) -> object:
    """What the call gives, or raises, in a thread of its own."""
    results: list[object] = []

    def work() -> None:
        try:
            results.append(call())
        except (DecodeError, ValueError) as error:
            results.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    return results[0]


def started_amid(decoder: FakeDecoder, call: Callable[[], object]) -> threading.Thread:
    """A thread that makes the call in the middle of the next pass, which goes on beside it."""
    thread = threading.Thread(target=call)

    def start() -> None:
        decoder.after = lambda: None
        thread.start()
        thread.join(BLOCKED_S)

    decoder.after = start
    return thread


# ---------------------------------------------------------------- adding and aborting


def test_a_second_thread_is_told_to_take_turns() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    errors: list[str] = []

    def come_in() -> None:
        try:
            engine.step()
        except DecodeError as error:
            errors.append(str(error))

    decoder.after = come_in  # in the middle of a pass
    request = engine.add(PROMPT, params(5))
    assert ids_of(drain(engine), request) == continuation(PROMPT, 5)
    assert errors == ["the engine is in use by another thread; take turns"]


def test_a_second_thread_can_abort_while_a_round_runs() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    running, other = engine.add(PROMPT, params(100)), engine.add([3, 4], params(20))
    answers: list[object] = []

    def abort_both() -> None:  # in the middle of a pass: what runs, and what never was
        if not answers:
            answers.append(in_another_thread(lambda: engine.abort(running)))
            answers.append(in_another_thread(lambda: engine.abort(99)))

    decoder.after = abort_both
    chunks = engine.step()
    assert answers == [True, False]
    assert {c.finish_reason for c in chunks} == {None}  # that round still counts
    n_said = len(ids_of(chunks, running))
    chunks += drain(engine)
    assert len(ids_of(chunks, running)) == n_said
    assert [c.finish_reason for c in chunks if c.request_id == running][-1] == "abort"
    assert ids_of(chunks, other) == continuation([3, 4], 20)
    assert in_another_thread(lambda: engine.abort(running)) is False


def test_an_abort_of_a_request_that_ends_in_this_very_round_does_no_harm() -> None:
    decoder = FakeDecoder(n_seq=1)
    engine = engine_on(decoder, "off", None)
    ending, queued = engine.add(PROMPT, params(1)), engine.add([3, 4], params(5))
    decoder.after = lambda: in_another_thread(lambda: engine.abort(ending))
    chunks = engine.step()
    decoder.after = lambda: None
    chunks += drain(engine)
    assert [c.finish_reason for c in chunks if c.request_id == ending] == ["length"]
    assert ids_of(chunks, queued) == continuation([3, 4], 5)


def test_requests_added_and_aborted_by_another_thread_while_rounds_run() -> None:
    engine = engine_on(FakeDecoder(n_seq=3, n_ctx=1 << 20))
    wanted: dict[int, list[int]] = {}
    aborted: list[int] = []

    def ask() -> None:
        for n in range(300):
            prompt = [n % 256, n // 256, 7]
            wanted[engine.add(prompt, params(5))] = prompt
            if n % 3 == 0:
                request = engine.add([9, n % 256], params(1 << 19))
                assert engine.abort(request)
                aborted.append(request)

    chunks: list[Chunk] = []
    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive() or not engine.is_idle:
        chunks += engine.step()
    asking.join()
    chunks += engine.step()
    said: dict[int, list[int]] = {request: [] for request in (*wanted, *aborted)}
    reasons: dict[int, str | None] = {}
    for chunk in chunks:
        said[chunk.request_id] += chunk.token_ids
        reasons[chunk.request_id] = chunk.finish_reason
    assert len(wanted) == 300
    assert all(said[r] == continuation(prompt, 5) for r, prompt in wanted.items())
    assert {reasons[r] for r in wanted} == {"length"}
    assert {reasons[r] for r in aborted} == {"abort"}


# ---------------------------------------------------------------- streams


def test_a_stream_closed_while_a_round_looks_for_closed_ones_breaks_nothing() -> None:
    outbox = Outbox()
    outbox.open_stream(7)
    looking: list[Iterator[int]] = []

    class Interleaved(list[int]):
        """The round looks as soon as the stream is noted, and goes on when that is through."""

        def append(self, request_id: int) -> None:
            super().append(request_id)
            looking.append(outbox.silence_gone())
            assert next(looking[0]) == request_id

    outbox._gone = Interleaved()
    outbox.close_stream(7)
    assert list(looking[0]) == []


def test_the_round_in_which_a_stream_is_closed_says_nothing_to_step() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    stream, added = engine.generate(PROMPT, params(100)), engine.add([3, 4], params(20))
    decoder.after = lambda: in_another_thread(stream.close)
    chunks = engine.step()
    decoder.after = lambda: None
    chunks += drain(engine)
    assert {c.request_id for c in chunks} == {added}
    assert ids_of(chunks, added) == continuation([3, 4], 20)


# ---------------------------------------------------------------- asking


def test_what_was_accepted_can_be_asked_for_while_a_round_learns() -> None:
    answers: list[object] = []

    class Asked(FixedCost):
        """Another thread asks while the engine learns what the pass of a round cost."""

        n_learnt = 0

        def observe_verify(self, batch_tokens: int, depth: int, seconds: float) -> None:
            self.n_learnt += 1
            if self.n_learnt == 1:
                answers.append(in_another_thread(lambda: engine.acceptance_by_position))

    cost = Asked(draft_ms=1.0)
    engine = engine_on(FakeDecoder(), cost=cost)
    list(engine.generate(PROMPT, params(1)))
    assert answers == [[(0, 0)] * 4]
    assert cost.n_learnt == 1  # of one round


def test_a_trace_that_another_thread_begins_holds_whole_rounds_only(tmp_path: Path) -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    engine.add(PROMPT, params(20))
    beginning = started_amid(decoder, lambda: engine.trace_to(tmp_path / "trace.jsonl"))
    engine.step()
    beginning.join()
    drain(engine)
    engine.stop_trace()
    rounds = read_trace(tmp_path / "trace.jsonl").rounds
    assert len(rounds) == 3  # 20 tokens are four rounds, and it began amid the first
    assert all(sequence.blocks for round in rounds for sequence in round.sequences)


# ---------------------------------------------------------------- closing


def test_close_waits_for_the_round_of_another_thread() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    request = engine.add(PROMPT, params(5))
    closing = started_amid(decoder, engine.close)
    chunks = engine.step()  # which ends the request: the fake fails if it is closed by then
    closing.join()
    assert ids_of(chunks, request) == continuation(PROMPT, 5)
    assert decoder.closed
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.step()


def test_no_round_begins_once_another_thread_closes() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    stream = engine.generate(PROMPT, params(100))
    closing = started_amid(decoder, engine.close)
    next(stream)
    with pytest.raises(ValueError, match="the engine is closed"):
        next(stream)  # whether the other thread has come to close by now or not
    closing.join()
    assert decoder.n_passes("verify") == 1
    assert engine.is_idle


def test_a_second_close_does_nothing() -> None:
    engine = engine_on(FakeDecoder())
    engine.add(PROMPT, params(100))
    engine.step()
    engine.close()
    engine.close()
    assert in_another_thread(engine.close) is None
    assert engine.is_idle


def test_closing_amid_the_own_round_is_refused_and_can_be_done_behind_it() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    engine.add(PROMPT, params(100))
    errors: list[str] = []

    def close() -> None:  # as a signal handler may
        try:
            engine.close()
        except DecodeError as error:
            errors.append(str(error))

    decoder.after = close
    engine.step()
    assert errors == ["a round of this very thread is running; call this behind it"]
    engine.close()
    assert decoder.closed


AFTER_CLOSE: dict[str, Callable[[Engine], object]] = {
    "add": lambda engine: engine.add(PROMPT),
    "generate": lambda engine: engine.generate(PROMPT),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "hi"}]),
    "check": lambda engine: engine.check(params(1)),
    "step": lambda engine: engine.step(),
    "tokenize": lambda engine: engine.tokenize("a"),
    "token_bytes": lambda engine: engine.token_bytes(97),
    "render": lambda engine: engine.render([]),
    "save_cache": lambda engine: engine.save_cache(PROMPT),
    "load_cache": lambda engine: engine.load_cache(b"[1]"),
    "set_speculation": lambda engine: engine.set_speculation("off"),
    "trace_to": lambda engine: engine.trace_to("never-written.jsonl"),
    "memory_use": lambda engine: engine.memory_use(),
}


@pytest.mark.parametrize("call", AFTER_CLOSE.values(), ids=AFTER_CLOSE)
def test_a_closed_engine_says_so_whatever_is_asked_of_it(call: Callable[[Engine], object]) -> None:
    engine = engine_on(FakeDecoder())
    engine.close()
    with pytest.raises(ValueError, match=r"^the engine is closed; make a new one$"):
        call(engine)


def test_a_closed_engine_has_nothing_to_abort_and_no_trace_to_stop() -> None:
    engine = engine_on(FakeDecoder())
    request = engine.add(PROMPT, params(100))
    engine.close()
    assert not engine.abort(request)
    engine.stop_trace()
