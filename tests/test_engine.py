"""The engine on scripted targets and drafters: rounds, queue, caches, ends, failures."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_decoder import (
    END,
    DraftScript,
    FakeDecoder,
    FixedCost,
    Script,
    engine_on,
    letters,
    mixed,
    oracle,
    repeating,
    saying,
    silent,
    wrong,
)

from dspark_edge import (
    Chunk,
    ContextFullError,
    DecodeError,
    Engine,
    ModelError,
    SamplingParams,
    rounds,
    speculation,
)
from dspark_edge.trace import read_trace

PROMPT = list(b"a prompt of some length")
DRAFTERS: dict[str, DraftScript] = {
    "oracle": oracle(letters),
    "wrong": wrong(letters),
    "mixed": mixed(letters, 0.6),
    "silent": silent,
}


def prompt_of(n: int, seed: int = 0) -> list[int]:
    """n tokens that no prompt of another seed begins with."""
    return [seed % 256] + [zlib.crc32(f"{seed} {i}".encode()) % 200 for i in range(1, n)]


def continuation(prompt: Sequence[int], n: int, target: Script = letters) -> list[int]:
    return oracle(target)(prompt, n)


def params(n: int | None = 20, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=n, seed=1, **others)  # type: ignore[arg-type]


def run(engine: Engine, prompt: str | Sequence[int], how: SamplingParams) -> list[Chunk]:
    return list(engine.generate(prompt, how))


def ids_of(chunks: Sequence[Chunk], request_id: int | None = None) -> list[int]:
    return [token for c in chunks if request_id in (None, c.request_id) for token in c.token_ids]


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def drain(engine: Engine) -> list[Chunk]:
    """Steps to the end of all work."""
    chunks: list[Chunk] = []
    for _ in range(5000):
        if engine.is_idle:
            return chunks
        chunks += engine.step()
    raise AssertionError("the engine does not come to an end")


# ---------------------------------------------------------------- same tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", ["always", "auto", "off"])
def test_the_text_does_not_depend_on_the_drafter_or_the_mode(mode: str, drafter: str) -> None:
    decoder = FakeDecoder(drafter=DRAFTERS[drafter])
    chunks = run(engine_on(decoder, mode), PROMPT, params(40))  # type: ignore[arg-type]
    assert ids_of(chunks) == continuation(PROMPT, 40)


@pytest.mark.parametrize("verify_len", range(5))
def test_the_text_does_not_depend_on_verify_len(verify_len: int) -> None:
    decoder = FakeDecoder(drafter=mixed(letters, 0.7))
    engine = engine_on(decoder, verify_len=verify_len)
    assert ids_of(run(engine, PROMPT, params(40))) == continuation(PROMPT, 40)
    assert max(n for kind, n in decoder.passes if kind == "verify") == 1 + verify_len


def test_lookup_says_the_same_in_fewer_passes() -> None:
    decoder = FakeDecoder(target=repeating(7))
    chunks = run(engine_on(decoder, "always", "lookup"), PROMPT, params(40))
    assert ids_of(chunks) == continuation(PROMPT, 40, repeating(7))
    assert decoder.n_passes("draft") == 0
    assert decoder.n_passes("verify") < 20


def test_lookup_on_auto_verifies_a_match_that_pays() -> None:
    decoder = FakeDecoder(target=repeating(7))
    chunks = run(engine_on(decoder, "auto", "lookup"), PROMPT, params(40))
    assert ids_of(chunks) == continuation(PROMPT, 40, repeating(7))
    assert chunks[-1].stats.n_accepted > 20


def test_an_oracle_gains_a_whole_block_and_the_bonus_token_per_round() -> None:
    decoder = FakeDecoder(n_draft=4)
    stats = run(engine_on(decoder), PROMPT, params(20))[-1].stats
    assert (stats.n_rounds, stats.n_accepted, stats.tau) == (4, 16, 5.0)
    assert (stats.acceptance, stats.n_drafted, stats.n_verified) == (1.0, 16, 16)


def test_a_chunk_says_how_many_of_its_tokens_were_drafted() -> None:
    chunks = run(engine_on(FakeDecoder(n_draft=4)), PROMPT, params(7))
    assert [(len(c.token_ids), c.n_accepted) for c in chunks] == [(5, 4), (2, 1)]


def test_speculation_off_drafts_nothing() -> None:
    decoder = FakeDecoder()
    stats = run(engine_on(decoder, "off", None), PROMPT, params(10))[-1].stats
    assert decoder.n_passes("draft") == 0
    assert (stats.n_rounds, stats.tau, stats.n_drafted) == (10, 1.0, 0)
    assert stats.speculation == "off: no drafter was asked for"


# ---------------------------------------------------------------- scenarios 1, 2, 3


def acceptance(chunks: Sequence[Chunk]) -> float:
    return chunks[-1].stats.acceptance


def test_a_second_shorter_request_on_the_same_slot_is_as_in_a_fresh_process() -> None:
    first, second = prompt_of(400, 1), prompt_of(30, 2)
    used = engine_on(FakeDecoder(n_seq=1, drafter=mixed(letters, 0.7)))
    run(used, first, params(60))
    fresh = engine_on(FakeDecoder(n_seq=1, drafter=mixed(letters, 0.7)))
    after, alone = run(used, second, params(60)), run(fresh, second, params(60))
    assert ids_of(after) == ids_of(alone) == continuation(second, 60)
    assert acceptance(after) == acceptance(alone)
    assert after[-1].stats.n_reused == 0


def test_lookup_remembers_nothing_of_the_request_before() -> None:
    decoder = FakeDecoder(n_seq=1, target=repeating(5))
    engine = engine_on(decoder, "always", "lookup")
    first = prompt_of(50, 1)
    run(engine, first, params(30))
    # Nothing has repeated in these two rounds; in the first request all of it has.
    assert run(engine, first[20:25], params(2))[-1].stats.n_drafted == 0


def test_a_warm_prompt_is_not_evaluated_again_and_the_drafter_goes_on() -> None:
    decoder = FakeDecoder(n_seq=1, drafter=mixed(letters, 0.7))
    engine = engine_on(decoder)
    prompt = prompt_of(100, 3)
    cold = run(engine, prompt, params(30))
    n_cold = decoder.n_tokens("prefill")
    warm = run(engine, prompt, params(30))
    longer = run(engine, [*prompt, *prompt_of(10, 4)], params(30))
    assert (n_cold, decoder.n_tokens("prefill") - n_cold) == (99, 9)
    assert [c[-1].stats.n_reused for c in (cold, warm, longer)] == [0, 99, 100]
    assert ids_of(warm) == ids_of(cold)
    assert acceptance(warm) == acceptance(cold)
    assert warm[-1].stats.n_drafted == cold[-1].stats.n_drafted > 0
    assert longer[-1].stats.n_drafted > 0


def test_a_parked_drafter_is_not_given_prompts() -> None:
    decoder = FakeDecoder(n_seq=1, drafter=wrong(letters))
    engine = engine_on(decoder, "auto")
    run(engine, prompt_of(100, 1), params(60))
    assert decoder.n_injected == 99
    assert engine.speculation_state.startswith("parked")
    run(engine, prompt_of(100, 2), params(5))
    assert (decoder.n_injected, decoder.n_tokens("prefill")) == (99, 198)


def test_the_next_turn_reuses_prompt_and_reply() -> None:
    decoder = FakeDecoder(n_seq=1)
    engine = engine_on(decoder)
    reply = ids_of(run(engine, PROMPT, params(13)))
    before = decoder.n_tokens("prefill")
    turn = [*PROMPT, *reply, *b"and then?"]
    again = run(engine, turn, params(10))
    assert again[-1].stats.n_reused == len(PROMPT) + 13 - 1  # the last token was the anchor
    assert decoder.n_tokens("prefill") - before == len(b"and then?")
    assert ids_of(again) == continuation(turn, 10)


def test_a_prompt_goes_to_the_slot_that_knows_most_of_it() -> None:
    decoder = FakeDecoder(n_seq=3)
    engine = engine_on(decoder)
    prompts = [prompt_of(40, seed) for seed in range(3)]
    for prompt in prompts:
        engine.add(prompt, params(5))
    drain(engine)
    for prompt in reversed(prompts):
        assert run(engine, [*prompt, 7], params(5))[-1].stats.n_reused == 40


def near_tie(decoder: FakeDecoder) -> Script:
    """Another winner in passes of more than 3 tokens."""

    def target(before: Sequence[int]) -> int:
        wide = decoder.passes[-1][0] == "verify" and decoder.passes[-1][1] > 3
        return letters(before) if not wide or len(before) % 3 else ord("Z")

    return target


@pytest.mark.parametrize("n_draft", [2, 4, 7])
def test_a_near_tie_that_depends_on_the_width_still_commits_a_token_per_round(n_draft: int) -> None:
    decoder = FakeDecoder(n_draft=n_draft, drafter=oracle(letters))
    decoder.target = near_tie(decoder)
    chunks = run(engine_on(decoder), PROMPT, params(200))
    assert len(ids_of(chunks)) == 200
    assert all(chunk.token_ids for chunk in chunks)
    assert decoder.n_passes("verify") <= 200 + decoder.n_rejections


# ---------------------------------------------------------------- scenarios 8, 9: ends inside a run


def test_a_stop_string_in_the_middle_of_a_run_ends_text_ids_and_usage_there() -> None:
    decoder = FakeDecoder(target=saying("one STOP two three", len(PROMPT)), n_draft=7)
    chunks = run(engine_on(decoder), PROMPT, params(50, stop=["STOP"]))
    assert text_of(chunks) == "one "
    assert ids_of(chunks) == list(b"one STOP")
    assert chunks[-1].stats.n_tokens == len(b"one STOP")
    assert chunks[-1].finish_reason == "stop"


def test_of_two_stop_strings_in_one_run_the_one_completed_first_wins() -> None:
    decoder = FakeDecoder(target=saying("abcdefgh", len(PROMPT)), n_draft=7)
    chunks = run(engine_on(decoder), PROMPT, params(50, stop=["bcdef", "cd"]))
    assert len(chunks) == 1
    assert (text_of(chunks), ids_of(chunks)) == ("ab", list(b"abcd"))


def test_max_tokens_inside_a_run_cuts_the_draft() -> None:
    decoder = FakeDecoder(n_draft=7)
    chunks = run(engine_on(decoder), PROMPT, params(3))
    assert ids_of(chunks) == continuation(PROMPT, 3)
    assert decoder.passes[-1] == ("verify", 3)
    assert chunks[-1].finish_reason == "length"


def test_the_smallest_margin_is_that_of_an_emitted_token() -> None:
    decoder = FakeDecoder(target=saying("abSTOPdefg", len(PROMPT)), n_draft=7)
    stats = run(engine_on(decoder), PROMPT, params(50, stop=["STOP"]))[-1].stats
    assert stats.min_margin == 1.0 + len(PROMPT)


def test_a_margin_behind_the_end_does_not_count() -> None:
    class Sinking(FakeDecoder):
        """Margins fall along a run."""

        def _emit(self, seq_id: int, verify_tokens: Sequence[int]):  # type: ignore[no-untyped-def]
            verdict = FakeDecoder._emit(self, seq_id, verify_tokens)
            verdict.margins = [10.0 - k for k in range(len(verdict.tokens))]
            return verdict

    decoder = Sinking(target=saying("abcdefgh", len(PROMPT)), n_draft=7)
    stats = run(engine_on(decoder), PROMPT, params(50, stop=["c"]))[-1].stats
    assert stats.min_margin == 8.0


@pytest.mark.parametrize("stop", [[], ["STOP"], ["three", "ee t"], ["S", "STOP"], ["nowhere"]])
@pytest.mark.parametrize("drafter", ["oracle", "mixed"])
def test_streamed_text_equals_plain_text_token_by_token(stop: list[str], drafter: str) -> None:
    target = saying("one STOP two three times héllo", len(PROMPT))
    scripts = {"oracle": oracle(target), "mixed": mixed(target, 0.5)}
    fast_decoder, how = FakeDecoder(target=target, drafter=scripts[drafter]), params(90, stop=stop)
    fast = run(engine_on(fast_decoder), PROMPT, how)
    plain = run(engine_on(FakeDecoder(target=target), "off", None), PROMPT, how)
    assert text_of(fast) == text_of(plain)
    assert ids_of(fast) == ids_of(plain)
    assert fast[-1].stats.n_tokens == plain[-1].stats.n_tokens == len(ids_of(plain))


def test_an_end_token_in_the_middle_of_a_draft_ends_the_reply() -> None:
    target = saying("hi", len(PROMPT), after=END)
    junk: DraftScript = lambda before, n: [*b"hi", END, *b"junk"][:n]  # noqa: E731
    decoder = FakeDecoder(target=target, drafter=junk, n_draft=7, n_seq=1)
    engine = engine_on(decoder)
    chunks = run(engine, PROMPT, params(50))
    assert (text_of(chunks), ids_of(chunks)) == ("hi", [*b"hi", END])
    assert chunks[-1].finish_reason == "stop"
    assert decoder.caches[0] == [*PROMPT, *b"hi"]  # the end token was the next anchor


def test_the_cache_holds_exactly_the_text_after_a_stop_string_inside_a_run() -> None:
    decoder = FakeDecoder(target=saying("abcdefgh", len(PROMPT)), n_draft=7, n_seq=1)
    engine = engine_on(decoder)
    run(engine, PROMPT, params(50, stop=["c"]))
    assert decoder.caches[0] == [*PROMPT, *b"ab"]
    turn = [*PROMPT, *b"abc", *b" next"]
    decoder.target = letters
    again = run(engine, turn, params(12))
    assert again[-1].stats.n_reused == len(PROMPT) + 2
    assert ids_of(again) == continuation(turn, 12)


def test_ignore_eos_goes_on_past_the_end_token() -> None:
    decoder = FakeDecoder(target=saying("hi", len(PROMPT)))
    chunks = run(engine_on(decoder, verify_len=0), PROMPT, params(5, ignore_eos=True))
    assert ids_of(chunks) == [*b"hi", END, END, END]
    assert chunks[-1].finish_reason == "length"


# ---------------------------------------------------------------- scenario 11: the context's end


@pytest.mark.parametrize("n_prompt", range(58, 65))
def test_the_draft_shrinks_to_fit_the_context_and_then_it_is_full(n_prompt: int) -> None:
    decoder = FakeDecoder(n_ctx=64, n_draft=7)
    prompt = prompt_of(n_prompt)
    chunks = run(engine_on(decoder), prompt, params(None))
    assert ids_of(chunks) == continuation(prompt, 64 - n_prompt + 1)
    assert chunks[-1].finish_reason == "context_full"


def test_a_prompt_longer_than_the_context_is_refused_with_the_way_out() -> None:
    engine = engine_on(FakeDecoder(n_ctx=64))
    with pytest.raises(
        ContextFullError, match=r"65 tokens but the context holds 64; pass a larger"
    ):
        engine.add(prompt_of(65))
    assert engine.is_idle


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    decoder = FakeDecoder()
    assert ids_of(run(engine_on(decoder), [97], params(6))) == continuation([97], 6)
    assert decoder.n_passes("prefill") == 0


# ---------------------------------------------------------------- scenario 12: silence


def test_fifty_rounds_without_a_proposed_token_are_said_once_and_end_drafting() -> None:
    decoder = FakeDecoder(drafter=silent)
    engine = engine_on(decoder)
    with pytest.warns(RuntimeWarning, match="proposed nothing in 50 rounds") as caught:
        chunks = run(engine, PROMPT, params(120))
    assert len(caught) == 1
    assert decoder.n_passes("draft") == 50
    assert engine.speculation_state == "off: the drafter proposed nothing in 50 rounds"
    assert ids_of(chunks) == continuation(PROMPT, 120)


def test_one_proposed_token_in_fifty_rounds_is_no_silence(recwarn: pytest.WarningsRecorder) -> None:
    def rarely(before: Sequence[int], n_draft: int) -> list[int]:
        return oracle(letters)(before, 1) if len(before) % 49 == 0 else []

    engine = engine_on(FakeDecoder(drafter=rarely))
    run(engine, PROMPT, params(200))
    assert engine.speculation_state == "always on (drafter)"
    assert not recwarn


# ---------------------------------------------------------------- scenario 16: cancelling


def test_cancelling_at_token_10_of_2000_frees_the_slot_at_once() -> None:
    decoder = FakeDecoder(n_ctx=4096, n_seq=1)
    engine = engine_on(decoder, "off", None)
    running, queued = engine.add(PROMPT, params(2000)), engine.add(prompt_of(30), params(5))
    chunks: list[Chunk] = []
    while len(ids_of(chunks, running)) < 10:
        chunks += engine.step()
    assert engine.abort(running)
    after = engine.step()  # says the end of one and begins the other
    assert [(c.request_id, c.finish_reason) for c in after] == [(running, "abort"), (queued, None)]
    assert ids_of(after) == continuation(prompt_of(30), 1)


def test_cancelling_a_queued_request_does_not_touch_the_running_one() -> None:
    decoder = FakeDecoder(n_seq=1)
    engine = engine_on(decoder)
    running, queued = engine.add(PROMPT, params(30)), engine.add(prompt_of(30), params(30))
    chunks = engine.step()
    assert engine.abort(queued)
    chunks += drain(engine)
    assert ids_of(chunks, running) == continuation(PROMPT, 30)
    assert [c.finish_reason for c in chunks if c.request_id == queued] == ["abort"]
    assert ids_of(chunks, queued) == []
    assert decoder.n_passes("prefill") == 1


def test_a_request_that_has_ended_cannot_be_cancelled() -> None:
    engine = engine_on(FakeDecoder())
    request = engine.add(PROMPT, params(3))
    drain(engine)
    assert not engine.abort(request)
    assert not engine.abort(99)


def test_cancelling_while_the_prompt_is_evaluated_keeps_what_was_evaluated() -> None:
    decoder = FakeDecoder(n_seq=1, n_batch=32)
    engine = engine_on(decoder)
    request = engine.add(prompt_of(100), params(5))
    assert engine.step() == []  # one chunk of the prompt
    assert engine.abort(request)
    assert [c.finish_reason for c in engine.step()] == ["abort"]
    assert engine.is_idle
    again = run(engine, prompt_of(100), params(5))
    assert again[-1].stats.n_reused == 32
    assert ids_of(again) == continuation(prompt_of(100), 5)


def test_cancelling_shows_the_text_held_back() -> None:
    engine = engine_on(FakeDecoder(target=saying("abST", len(PROMPT), after=122)), "off", None)
    request = engine.add(PROMPT, params(50, stop=["STOP"]))
    shown = text_of([c for _ in range(4) for c in engine.step()])
    engine.abort(request)
    assert shown == "ab"
    assert text_of(engine.step()) == "ST"


def test_closing_the_iterator_of_generate_aborts_the_request() -> None:
    engine = engine_on(FakeDecoder())
    stream = engine.generate(PROMPT, params(100))
    next(stream)
    stream.close()
    assert engine.is_idle
    assert engine.step() == []


def test_closing_an_iterator_that_was_never_read_aborts_too() -> None:
    engine = engine_on(FakeDecoder())
    stream = engine.generate(PROMPT, params(100))
    stream.close()
    assert engine.is_idle


def test_dropping_an_iterator_aborts_the_request() -> None:
    engine = engine_on(FakeDecoder())
    for chunk in engine.generate(PROMPT, params(100)):
        assert chunk.token_ids
        break
    del chunk
    assert engine.is_idle


def test_a_request_aborted_by_its_id_ends_its_iterator_with_a_last_chunk() -> None:
    engine = engine_on(FakeDecoder())
    stream = engine.generate(PROMPT, params(100))
    first = next(stream)
    engine.abort(first.request_id)
    assert [c.finish_reason for c in stream] == ["abort"]


def test_closing_an_iterator_after_the_engine_is_harmless() -> None:
    engine = engine_on(FakeDecoder())
    stream = engine.generate(PROMPT, params(100))
    next(stream)
    engine.close()
    stream.close()


def test_reading_an_iterator_after_the_engine_is_closed_raises() -> None:
    engine = engine_on(FakeDecoder())
    stream = engine.generate(PROMPT, params(100))
    next(stream)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)


# ---------------------------------------------------------------- many requests


def test_many_requests_at_once_each_get_their_own_text() -> None:
    decoder = FakeDecoder(n_seq=4, drafter=mixed(letters, 0.6))
    engine = engine_on(decoder)
    prompts = {engine.add(prompt_of(20 + 7 * i, i), params(25 + i)): i for i in range(10)}
    chunks = drain(engine)
    for request, i in prompts.items():
        assert ids_of(chunks, request) == continuation(prompt_of(20 + 7 * i, i), 25 + i)
    assert sum(c.finish_reason == "length" for c in chunks) == 10


def test_a_long_prompt_is_evaluated_in_small_chunks_between_rounds_of_others() -> None:
    decoder = FakeDecoder(n_seq=2, n_ctx=2048, n_batch=512)
    engine = engine_on(decoder, "off", None)
    running = engine.add(PROMPT, params(50))
    engine.step()
    engine.add(prompt_of(600), params(5))
    decoder.passes.clear()
    for _ in range(5):
        assert len(ids_of(engine.step(), running)) == 1  # never waits for more than one chunk
    prefills = [n for kind, n in decoder.passes if kind == "prefill"]
    assert prefills == [128, 128, 128, 128, 599 - 4 * 128]


def test_the_prompt_that_came_first_is_evaluated_first_whatever_its_slot() -> None:
    engine = engine_on(FakeDecoder(n_seq=2, n_ctx=2048))
    engine.add([1], params(2))  # ends in the first step and leaves slot 0 to the last request
    first = engine.add(prompt_of(600, 1), params(5))
    engine.step()
    second = engine.add(prompt_of(600, 2), params(5))
    chunks = drain(engine)
    assert list(dict.fromkeys(c.request_id for c in chunks)) == [first, second]


def test_a_prompt_alone_is_evaluated_in_whole_batches() -> None:
    decoder = FakeDecoder(n_ctx=2048, n_batch=512)
    run(engine_on(decoder), prompt_of(1200), params(2))
    assert [n for kind, n in decoder.passes if kind == "prefill"] == [512, 512, 1199 - 1024]


def test_one_step_evaluates_at_most_one_chunk() -> None:
    decoder = FakeDecoder(n_seq=4)
    engine = engine_on(decoder)
    for i in range(4):
        engine.add(prompt_of(50, i), params(50))
    for n in range(1, 5):
        engine.step()
        assert decoder.n_passes("prefill") == n


def test_requests_beyond_the_slots_wait_in_order() -> None:
    engine = engine_on(FakeDecoder(n_seq=2))
    requests = [engine.add(prompt_of(20, i), params(10 + i)) for i in range(6)]
    chunks = drain(engine)
    first_seen = list(dict.fromkeys(c.request_id for c in chunks))
    assert first_seen == requests


def test_running_requests_gain_a_token_in_every_step() -> None:
    engine = engine_on(FakeDecoder(n_seq=3, drafter=wrong(letters)))
    requests = [engine.add([i], params(10)) for i in range(3)]
    for _ in range(10):
        chunks = engine.step()
        assert [(c.request_id, len(c.token_ids)) for c in chunks] == [(r, 1) for r in requests]
    assert engine.is_idle


def test_one_round_is_one_pass_for_all_sequences() -> None:
    decoder = FakeDecoder(n_seq=3, n_draft=4)
    engine = engine_on(decoder)
    for i in range(3):
        engine.add([i], params(10))
    engine.step()
    assert decoder.passes == [("draft", 3), ("verify", 15)]


def test_an_idle_engine_steps_without_a_chunk() -> None:
    engine = engine_on(FakeDecoder())
    assert engine.is_idle
    assert engine.step() == []


# ---------------------------------------------------------------- streams


def test_two_iterators_read_in_turn_lose_no_chunk() -> None:
    engine = engine_on(FakeDecoder(drafter=mixed(letters, 0.5)))
    one, two = prompt_of(20, 1), prompt_of(30, 2)
    streams = engine.generate(one, params(40)), engine.generate(two, params(25))
    pairs = list(zip_longest(*streams))
    assert ids_of([a for a, _ in pairs if a]) == continuation(one, 40)
    assert ids_of([b for _, b in pairs if b]) == continuation(two, 25)


def test_iterators_and_steps_in_turn_lose_no_chunk() -> None:
    engine = engine_on(FakeDecoder(drafter=mixed(letters, 0.5)))
    prompts = [prompt_of(20 + i, i) for i in range(3)]
    one, two = engine.generate(prompts[0], params(30)), engine.generate(prompts[1], params(50))
    added = engine.add(prompts[2], params(40))
    stepped: list[Chunk] = []
    of_one: list[Chunk] = []
    of_two: list[Chunk] = []
    for a, b in zip_longest(one, two):
        of_one += [a] if a else []
        of_two += [b] if b else []
        stepped += engine.step()
    stepped += drain(engine)
    assert ids_of(of_one) == continuation(prompts[0], 30)
    assert ids_of(of_two) == continuation(prompts[1], 50)
    assert {c.request_id for c in stepped} == {added}
    assert ids_of(stepped) == continuation(prompts[2], 40)


def test_an_iterator_leaves_the_chunks_of_added_requests_to_step() -> None:
    engine = engine_on(FakeDecoder())
    added = engine.add(prompt_of(20, 1), params(10))
    run(engine, PROMPT, params(40))
    assert ids_of(engine.step(), added) == continuation(prompt_of(20, 1), 10)


# ---------------------------------------------------------------- text


def test_only_whole_characters_are_shown_when_rounds_split_them() -> None:
    text = "naïve — 日本語 🙂 end"
    decoder = FakeDecoder(target=saying(text, len(PROMPT)), n_draft=2)
    chunks = run(engine_on(decoder), PROMPT, params(90))
    assert text_of(chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)


def test_a_token_of_many_bytes_may_end_inside_a_character() -> None:
    smile = "🙂".encode()
    pieces = {257: b"a" + smile[:3], 258: smile[3:] + b"b"}
    decoder = FakeDecoder(target=saying([257, 258], len(PROMPT)), pieces=pieces)
    chunks = run(engine_on(decoder, "off", None), PROMPT, params(9))
    assert [chunk.text for chunk in chunks] == ["a", "🙂b", ""]


def test_a_character_cut_by_max_tokens_is_shown_as_replaced() -> None:
    decoder = FakeDecoder(target=saying("ab🙂", len(PROMPT)))
    assert text_of(run(engine_on(decoder), PROMPT, params(4))) == "ab\ufffd"


# ---------------------------------------------------------------- failures


def test_a_failed_pass_ends_only_the_request_that_caused_it() -> None:
    decoder = FakeDecoder(n_seq=3)
    engine = engine_on(decoder, verify_len=2)
    requests = [engine.add(prompt_of(20, i), params(30)) for i in range(3)]
    chunks = [c for _ in range(4) for c in engine.step()]
    decoder.broken = {1}
    chunks += drain(engine)
    ends = {c.request_id: (c.finish_reason, c.error) for c in chunks if c.finish_reason}
    assert ends[requests[1]] == ("error", "llama.cpp could not evaluate sequences [1]")
    for i in (0, 2):
        assert ends[requests[i]] == ("length", "")
        assert ids_of(chunks, requests[i]) == continuation(prompt_of(20, i), 30)


def test_draft_tokens_of_a_failed_pass_do_not_count_as_verified() -> None:
    decoder = FakeDecoder(n_seq=2)
    engine = engine_on(decoder)
    request = engine.add([1], params(30))
    engine.add([2], params(30))
    decoder.broken = {1}
    (chunk,) = [c for c in engine.step() if c.request_id == request]
    assert (chunk.stats.n_rounds, chunk.stats.n_verified, chunk.n_accepted) == (1, 0, 0)


def test_a_failed_request_raises_in_its_own_iterator_alone() -> None:
    decoder = FakeDecoder(n_seq=2)
    engine = engine_on(decoder)
    bad, good = engine.generate([1], params(20)), engine.generate([2], params(20))
    next(bad), next(good)
    decoder.broken = {0}
    with pytest.raises(DecodeError, match=r"could not evaluate sequences \[0\]"):
        list(bad)
    assert len(ids_of(list(good))) == 20 - 5


def test_a_failed_prefill_ends_that_request_and_the_next_one_runs() -> None:
    decoder = FakeDecoder(n_seq=1)
    engine = engine_on(decoder)
    decoder.broken = {0}
    with pytest.raises(DecodeError, match="could not evaluate"):
        run(engine, PROMPT, params(5))
    decoder.broken = set()
    assert ids_of(run(engine, PROMPT, params(5))) == continuation(PROMPT, 5)


def test_an_emptied_sequence_is_evaluated_again_and_goes_on() -> None:
    decoder = FakeDecoder(n_seq=2, empties=True)
    engine = engine_on(decoder)
    requests = [engine.add(prompt_of(20, i), params(30)) for i in range(2)]
    chunks = [c for _ in range(3) for c in engine.step()]
    decoder.broken = {0}
    chunks += engine.step()
    decoder.broken = set()
    chunks += drain(engine)
    for i in range(2):
        assert ids_of(chunks, requests[i]) == continuation(prompt_of(20, i), 30)


@pytest.mark.parametrize("culprit", range(3))
def test_a_pass_that_fails_and_empties_every_time_ends_only_its_request(culprit: int) -> None:
    decoder = FakeDecoder(n_seq=3, empties=True, broken_in=("verify",))
    engine = engine_on(decoder)
    requests = [engine.add(prompt_of(20, i), params(30)) for i in range(3)]
    chunks = [c for _ in range(4) for c in engine.step()]
    decoder.broken = {culprit}
    chunks += drain(engine)
    ends = {c.request_id: c.finish_reason for c in chunks if c.finish_reason}
    assert ends.pop(requests[culprit]) == "error"
    assert set(ends.values()) == {"length"}
    for i in {0, 1, 2} - {culprit}:
        assert ids_of(chunks, requests[i]) == continuation(prompt_of(20, i), 30)


def test_a_row_that_allows_no_token_fails_after_what_was_said_before() -> None:
    decoder = FakeDecoder(n_draft=4, dead_end=len(PROMPT) + 7)
    engine = engine_on(decoder)
    chunks: list[Chunk] = []
    with pytest.raises(DecodeError, match="no token is allowed"):
        chunks.extend(engine.generate(PROMPT, params(30)))
    assert ids_of(chunks) == continuation(PROMPT, 7)
    assert text_of(chunks) == bytes(continuation(PROMPT, 7)).decode()
    assert decoder.caches[0] == [*PROMPT, *continuation(PROMPT, 6)]
    assert engine.is_idle


def test_a_refused_rewind_means_evaluating_the_prompt_again() -> None:
    decoder = FakeDecoder(n_seq=1, refuses_rewind=True)
    engine = engine_on(decoder)
    run(engine, PROMPT, params(7, stop=["nowhere"]))
    again = run(engine, PROMPT, params(7))
    assert again[-1].stats.n_reused == 0
    assert ids_of(again) == continuation(PROMPT, 7)


def test_a_refused_cut_behind_a_stop_string_leaves_an_empty_slot() -> None:
    decoder = FakeDecoder(n_seq=1, refuses_rewind=True, target=saying("abcdefgh", len(PROMPT)))
    engine = engine_on(decoder)
    run(engine, PROMPT, params(50, stop=["c"]))
    assert decoder.caches[0] == []
    decoder.target = letters
    turn = [*PROMPT, *b"abc"]
    again = run(engine, turn, params(6))
    assert (again[-1].stats.n_reused, ids_of(again)) == (0, continuation(turn, 6))


def test_a_failed_draft_turns_speculation_off_and_costs_no_token() -> None:
    decoder = FakeDecoder()
    engine = engine_on(decoder)
    stream = engine.generate(PROMPT, params(30))
    chunks = [next(stream)]
    decoder.draft_fails = True
    with pytest.warns(RuntimeWarning, match="speculation off: the drafter failed: the drafter's"):
        chunks += list(stream)
    assert ids_of(chunks) == continuation(PROMPT, 30)
    assert chunks[-1].stats.speculation == "off: the drafter failed: the drafter's cache is broken"


def test_an_interrupt_behind_a_pass_costs_the_other_requests_nothing() -> None:
    decoder = FakeDecoder(n_seq=2)
    engine = engine_on(decoder)
    interrupted, other = engine.generate([1, 2], params(40)), engine.add([3, 4], params(40))
    next(interrupted)

    def interrupt() -> None:
        decoder.after = lambda: None
        raise KeyboardInterrupt

    chunks = engine.step()
    list(zip(range(2), interrupted, strict=False))
    decoder.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(interrupted)
    chunks += drain(engine)
    assert ids_of(chunks, other) == continuation([3, 4], 40)
    assert {c.request_id for c in chunks} == {other}


def test_an_interrupted_iterator_aborts_its_request() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    engine = engine_on(FakeDecoder(after=interrupt))
    stream = engine.generate(PROMPT, params(40))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert engine.is_idle
    assert list(stream) == []


class Refusing(FakeDecoder):
    """Fails in a call about one sequence."""

    refused: str = ""  # the call

    def open_sequence(self, seq_id: int, sampling: object) -> None:
        self._refuse("open_sequence", seq_id)
        FakeDecoder.open_sequence(self, seq_id, sampling)

    def rewind(self, seq_id: int, n_keep: int) -> int:
        self._refuse("rewind", seq_id)
        return FakeDecoder.rewind(self, seq_id, n_keep)

    def _refuse(self, call: str, seq_id: int) -> None:
        if self.refused == call and seq_id == 1:
            raise MemoryError(f"no memory for {call}")


@pytest.mark.parametrize("call", ["open_sequence", "rewind"])
def test_a_sequence_that_cannot_be_opened_ends_only_its_request(call: str) -> None:
    decoder = Refusing(n_seq=2)
    engine = engine_on(decoder)
    running = engine.add(PROMPT, params(60))
    chunks = engine.step()
    decoder.refused = call
    bad = engine.add([1, 2], params(20))
    chunks += engine.step()
    decoder.refused = ""
    later = engine.add([3, 4], params(20))
    chunks += engine.step()
    chunks += engine.step()
    assert ids_of(chunks, later)  # beside the running one: the slot was given back
    chunks += drain(engine)
    ends = {c.request_id: (c.finish_reason, c.error) for c in chunks if c.finish_reason}
    assert ends.pop(bad) == ("error", f"no memory for {call}")
    assert ends == {running: ("length", ""), later: ("length", "")}
    assert ids_of(chunks, running) == continuation(PROMPT, 60)
    assert ids_of(chunks, later) == continuation([3, 4], 20)


# ---------------------------------------------------------------- seeds and parameters


def test_no_seed_draws_a_new_one_and_reports_it() -> None:
    engine = engine_on(FakeDecoder())
    seeds = {run(engine, PROMPT, SamplingParams(max_tokens=2))[-1].stats.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_given_seed_reaches_the_sampler_and_the_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    make: Callable[..., object] = lambda params, *, seed, **_: seen.append(seed)  # noqa: E731
    monkeypatch.setattr("dspark_edge.intake.sampling_config", make)
    stats = run(engine_on(FakeDecoder()), PROMPT, SamplingParams(seed=77, max_tokens=2))[-1].stats
    assert stats.seed == 77
    assert seen == [77]


@pytest.mark.parametrize(("penalizes", "expected"), [(True, 0), (False, len(PROMPT))])
def test_penalties_count_from_the_prompts_end_where_the_prompt_is_left_out(
    monkeypatch: pytest.MonkeyPatch, penalizes: bool, expected: int
) -> None:
    seen: list[int] = []
    make: Callable[..., object] = lambda **given: seen.append(given["penalty_from"])  # noqa: E731
    monkeypatch.setattr("dspark_edge.sampling.SamplingConfig", make)
    run(engine_on(FakeDecoder()), PROMPT, params(2, penalize_prompt=penalizes))
    assert seen == [expected]


def test_penalize_prompt_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="penalize_prompt is 3; it must be true or false"):
        SamplingParams(penalize_prompt=3)  # type: ignore[arg-type]


def test_a_json_schema_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas: list[str] = []

    def convert(schema: str) -> str:
        schemas.append(schema)
        return 'root ::= "a"'

    monkeypatch.setattr("dspark_edge.sampling.json_schema_to_gbnf", convert)
    run(engine_on(FakeDecoder()), PROMPT, SamplingParams(json_schema="{}", max_tokens=2))
    assert schemas == ["{}"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([1.5], "no str or list of token ids"),
        (["a"], "no str or list of token ids"),
        (None, "no str or list of token ids"),
        ([5, 300], "token id is 300; this model has ids 0 to 299"),
        ([-1], "token id is -1"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: str | list[int], message: str) -> None:
    engine = engine_on(FakeDecoder())
    with pytest.raises(ValueError, match=message):
        engine.add(prompt)
    assert engine.is_idle


def test_a_bad_json_schema_is_refused_before_anything_runs() -> None:
    engine = engine_on(FakeDecoder())
    with pytest.raises(ValueError, match="json_schema cannot be turned into a grammar"):
        engine.add(PROMPT, SamplingParams(json_schema="{"))
    assert engine.is_idle


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(ModelError, match="template"):
        engine_on(FakeDecoder()).chat([{"role": "user", "content": "hi"}])


def test_chat_renders_the_conversation_with_the_model_template() -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    engine = engine_on(FakeDecoder(template=template))
    prompt = list(b"[user]hi>")
    chunks = list(engine.chat([{"role": "user", "content": "hi"}], params(6)))
    assert ids_of(chunks) == continuation(prompt, 6)
    assert chunks[-1].stats.n_prompt == len(prompt)


def test_the_end_of_a_reply_counts_for_the_draft_it_cuts() -> None:
    engine = engine_on(FakeDecoder(n_draft=4))
    run(engine, PROMPT, params(3))
    assert engine.acceptance_by_position == [(1, 1), (1, 1), (1, 1), (0, 0)]


# ---------------------------------------------------------------- parking, through the engine


def test_a_useless_drafter_is_parked_and_the_reason_is_in_the_statistics() -> None:
    decoder = FakeDecoder(drafter=wrong(letters), n_ctx=1024)
    cost = FixedCost(verify_ms=(10, 15, 20, 25, 30), draft_ms=5)
    stats = run(engine_on(decoder, "auto", cost=cost), PROMPT, params(300))[-1].stats
    assert stats.speculation.startswith("parked: drafting promises 0.")
    assert decoder.n_passes("draft") < 40


def test_a_good_drafter_is_used() -> None:
    decoder = FakeDecoder(n_ctx=1024)
    cost = FixedCost(verify_ms=(10, 11, 12, 13, 14), draft_ms=2)
    stats = run(engine_on(decoder, "auto", cost=cost), PROMPT, params(300))[-1].stats
    assert stats.speculation.startswith("drafting: promises")
    assert stats.tau > 4.0


# ---------------------------------------------------------------- times


def test_each_second_of_a_round_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of five tokens: draft 3 ms, pass 10 ms, a draw 2 ms, the text of a token 1 ms."""
    now_s = 0.0
    seen: list[tuple[str, float]] = []

    def spend(seconds: float, *, in_llama: bool = False) -> None:
        nonlocal now_s
        now_s += seconds
        decoder.decode_s += seconds if in_llama else 0.0

    def target(before: Sequence[int]) -> int:
        spend(0.002)
        return letters(before)

    def drafter(before: Sequence[int], n_draft: int) -> list[int]:
        spend(0.003, in_llama=True)
        return oracle(letters)(before, n_draft)

    class Seen(FixedCost):
        def observe_verify(self, batch_tokens: int, depth: int, seconds: float) -> None:
            seen.append(("pass", seconds))

        def observe_other(self, seconds: float) -> None:
            seen.append(("other", seconds))

    def text_of_token(token: int) -> bytes:
        spend(0.001)
        return bytes([token])

    decoder = FakeDecoder(target=target, drafter=drafter)
    decoder.after = lambda: spend(0.010, in_llama=True)
    for module in (rounds, speculation):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(speculation, "OBSERVE_S", 0.0)
    engine = engine_on(decoder, cost=Seen(draft_ms=1.0))
    engine._intake.token_bytes = text_of_token  # type: ignore[assignment]
    engine.trace_to(tmp_path / "trace.jsonl")
    stats = run(engine, PROMPT, params(10))[-1].stats
    assert seen[1:] == [("pass", pytest.approx(0.010)), ("other", pytest.approx(0.005))]
    lines = read_trace(tmp_path / "trace.jsonl").rounds
    for line in lines:
        assert (line.draft_s, line.verify_s, line.own_s) == pytest.approx((0.003, 0.020, 0.005))
        assert line.pass_s == pytest.approx(0.010)
    assert stats.decode_s == pytest.approx(sum(line.measured_s for line in lines))
    assert stats.own_s == pytest.approx(2 * 0.015)
