"""The engine acting on pressure: what is given up, in which order, what is said, what comes back.

On the scripted decoder and a machine whose clock and memory are the test's own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_decoder import (
    FakeDecoder,
    FixedCost,
    Machine,
    engine_on,
    letters,
    repeating,
    silent,
)

from dspark_edge import BusyError, Chunk, Engine, SamplingParams
from dspark_edge.bench.__main__ import main as bench
from dspark_edge.pressure import STEPS, Limits
from dspark_edge.speculation import Mode, Proposer
from dspark_edge.trace import read_trace

PROMPT = list(b"a prompt of some length")
OTHER = list(b"what another one asks")
QUICK = Limits(rearm_s=2.0, rearm_release_s=3.0)
FREE_MB, LOW_MB, SCARCE_MB = 4000.0, 212.0, 100.0


def continuation(prompt: Sequence[int], n: int) -> list[int]:
    text = list(prompt)
    for _ in range(n):
        text.append(letters(text))
    return text[len(prompt) :]


def ids_of(chunks: Sequence[Chunk], request_id: int | None = None) -> list[int]:
    wanted = (c for c in chunks if request_id in (None, c.request_id))
    return [token for chunk in wanted for token in chunk.token_ids]


def steps_of(engine: Engine) -> list[str]:
    return [action.kind for action in engine.pressure]


def limit(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0.0)


def ticking(machine: Machine, **options: object) -> FakeDecoder:
    """A decoder whose every verify takes a second of the machine's time."""

    def second() -> None:
        machine.now_s += 1.0

    return FakeDecoder(after=second, n_ctx=4096, **options)  # type: ignore[arg-type]


def slow_engine(
    mode: Mode = "always",
    proposer: Proposer | None = "drafter",
    *,
    limits: Limits | None = None,
    **options: object,
) -> tuple[Machine, FakeDecoder, Engine]:
    """A machine of 4 GB free, a ticking decoder with these options, and the engine on both."""
    machine = Machine()
    decoder = ticking(machine, **options)
    return machine, decoder, engine_on(decoder, mode, proposer, machine=machine, limits=limits)


def pass_time(engine: Engine, machine: Machine, seconds: int) -> None:
    """An idle engine that is asked once a second."""
    for _ in range(seconds):
        machine.now_s += 1.0
        assert engine.step() == []


# ---------------------------------------------------------------- a running reply


def test_low_memory_takes_the_steps_in_order_and_the_reply_goes_on() -> None:
    machine, decoder, engine = slow_engine(limits=QUICK)
    request = engine.add(PROMPT, limit(400))
    chunks = engine.step()
    machine.free_mb = LOW_MB
    seen: list[list[str]] = []
    for _ in range(12):
        chunks += engine.step()
        seen.append(steps_of(engine))
    taken = [steps for steps, _ in itertools.groupby(seen)]
    assert taken == [list(STEPS[: n + 1]) for n in range(5)]
    assert decoder.in_memory == set()
    machine.free_mb = FREE_MB
    while not engine.is_idle:
        chunks += engine.step()
    assert engine.pressure == ()
    assert decoder.in_memory == {"weights", "context"}
    assert ids_of(chunks, request) == continuation(PROMPT, 400)
    assert chunks[-1].finish_reason == "length"


def test_shortened_rounds_verify_half_the_drafts_and_parked_ones_none() -> None:
    machine, decoder, engine = slow_engine()
    engine.add(PROMPT, limit(300))
    engine.step()
    machine.free_mb = LOW_MB
    decoder.passes.clear()
    for _ in range(3):
        engine.step()
    assert [n for kind, n in decoder.passes if kind == "verify"] == [3, 3, 1]
    assert decoder.n_passes("draft") == 2
    assert engine.speculation_state == "parked: free memory 212 MB is below 300 MB"


@pytest.mark.parametrize("n_seq", [1, 4])
def test_shortened_rounds_verify_half_the_drafts_where_lookup_may_propose_more(n_seq: int) -> None:
    machine, decoder, engine = slow_engine("auto", n_lookup=16)
    assert widths_around_shortening(machine, decoder, engine, n_seq) == (5 * n_seq, 3 * n_seq)


@pytest.mark.parametrize("n_seq", [1, 4])
def test_shortened_rounds_cut_long_copies_as_short_as_drafts(n_seq: int) -> None:
    machine, decoder, engine = slow_engine("auto", n_lookup=16, target=repeating(4), drafter=silent)
    usual, shortened = widths_around_shortening(machine, decoder, engine, n_seq)
    assert usual > 5 * n_seq
    assert shortened == 3 * n_seq


def test_without_its_drafter_lookup_is_cut_to_half_its_usual_length() -> None:
    machine, decoder, engine = slow_engine(
        "auto", n_lookup=16, target=repeating(4), draft_fails=True
    )
    with pytest.warns(RuntimeWarning, match="speculation with lookup alone"):
        usual, shortened = widths_around_shortening(machine, decoder, engine, 1)
    assert (usual, shortened) == (17, 5)


def widths_around_shortening(
    machine: Machine, decoder: FakeDecoder, engine: Engine, n_seq: int
) -> tuple[int, int]:
    """Tokens in the last pass before n_seq running replies are shortened, and in the next one."""
    for k in range(n_seq):
        engine.add([*PROMPT, *PROMPT, k], limit(300))
    for _ in range(20):
        engine.step()
    machine.free_mb = LOW_MB
    engine.step()
    assert steps_of(engine) == ["shorten"]
    usual, shortened = [n for kind, n in decoder.passes if kind == "verify"][-2:]
    return usual, shortened


def test_the_state_and_the_news_say_what_happened_and_why() -> None:
    machine, _, engine = slow_engine("auto", limits=QUICK)
    engine.add(PROMPT, limit(4000))
    engine.step()
    engine.generate(OTHER, limit(3)).close()
    machine.free_mb = LOW_MB
    for _ in range(10):
        engine.step()
    assert engine.speculation_state == "drafter released: free memory 212 MB is below 300 MB"
    why = "free memory 212 MB is below 300 MB"
    assert engine.take_pressure_news() == [
        f"shorter drafts are verified: {why}",
        f"drafting is parked: {why}",
        f"the drafter's context is released: {why}",
        f"the drafter's weights are released: {why}",
        f"caches of idle sessions are emptied: {why}",
    ]
    assert engine.take_pressure_news() == []
    machine.free_mb = FREE_MB
    for _ in range(14):
        engine.step()
    above = "free memory 4000 MB is above 375 MB"
    assert engine.take_pressure_news() == [
        f"no longer: caches of idle sessions are emptied: {above}, for 3 s",
        f"no longer: the drafter's weights are released: {above}, for 5 s",
        f"no longer: the drafter's context is released: {above}, for 7 s",
        f"no longer: drafting is parked: {above}, for 9 s",
        f"no longer: shorter drafts are verified: {above}, for 11 s",
    ]
    assert engine.speculation_state.startswith("drafting")


def test_each_step_is_an_event_of_the_trace_that_explain_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, _, engine = slow_engine()
    engine.trace_to(tmp_path / "trace.jsonl")
    engine.add(PROMPT, limit(40))
    engine.step()
    machine.free_mb = LOW_MB
    for _ in range(3):
        engine.step()
    engine.close()
    trace = read_trace(tmp_path / "trace.jsonl")
    assert [(e.event, e.text) for e in trace.events] == [
        ("pressure", "shorter drafts are verified: free memory 212 MB is below 300 MB"),
        ("pressure", "drafting is parked: free memory 212 MB is below 300 MB"),
    ]
    assert trace.rounds[-1].state == "parked: free memory 212 MB is below 300 MB"
    assert bench(["explain", str(tmp_path / "trace.jsonl")]) == 0
    assert "pressure: drafting is parked: free memory 212 MB is below 300 MB" in (
        capsys.readouterr().err
    )


def test_with_lookup_there_is_no_drafter_to_release() -> None:
    machine, _, engine = slow_engine("auto", "lookup", in_memory=set())
    engine.add(PROMPT, limit(300))
    machine.free_mb = LOW_MB
    for _ in range(20):
        engine.step()
    assert steps_of(engine) == ["shorten", "park", "shrink_idle"]
    assert engine.speculation_state == "parked: free memory 212 MB is below 300 MB"


def test_without_speculation_there_is_nothing_to_shorten() -> None:
    machine = Machine(free_mb=SCARCE_MB)
    decoder = ticking(machine, in_memory=set())
    engine = engine_on(decoder, "off", None, machine=machine)
    pass_time(engine, machine, 1)
    assert steps_of(engine) == ["shrink_idle", "refuse"]


def test_no_look_is_taken_before_its_time() -> None:
    machine = Machine()
    engine = engine_on(FakeDecoder(), machine=machine)
    engine.add(PROMPT, limit(100))
    while not engine.is_idle:
        engine.step()
    assert machine.n_readings == 1  # the clock stood still
    machine.now_s += 0.99
    engine.step()
    assert machine.n_readings == 1
    machine.now_s += 0.01
    engine.step()
    assert machine.n_readings == 2


def test_slow_rounds_count_only_where_passes_were_profiled() -> None:
    class Slow(FixedCost):
        @property
        def load(self) -> float:
            return 2.0

    for mode, expected in (("auto", ["shorten", "park"]), ("always", [])):
        machine = Machine()
        engine = engine_on(
            ticking(machine),
            mode,  # type: ignore[arg-type]
            cost=Slow(draft_ms=1.0),
            machine=machine,
        )
        engine.add(PROMPT, limit(300))
        for _ in range(10):
            engine.step()
        assert steps_of(engine) == expected


def test_on_battery_a_draft_must_promise_more() -> None:
    """1.2x of plain decoding: enough for the mains, not for a battery's bar of 1.5."""
    limits = Limits(battery_bar=1.5, low_battery_bar=1.5)
    n_verified = []
    for on_battery in (False, True):
        machine = Machine(on_battery=on_battery)
        decoder = ticking(machine, n_draft=1)
        cost = FixedCost(verify_ms=[10.0, 15.0], draft_ms=0.1)
        engine = engine_on(decoder, "auto", cost=cost, machine=machine, limits=limits)
        engine.add(PROMPT, limit(60))
        while not engine.is_idle:
            engine.step()
        n_verified.append(decoder.n_tokens("verify") - decoder.n_passes("verify"))
    assert n_verified[0] > 20
    assert n_verified[1] == 0
    assert [a.text for a in engine.pressure] == ["drafts must promise more: on battery"]


# ---------------------------------------------------------------- idle sessions, new requests


def filled(machine: Machine, prompts: Sequence[Sequence[int]]) -> tuple[FakeDecoder, Engine]:
    """An engine whose idle slots hold a conversation of each prompt, ten tokens each."""
    decoder = FakeDecoder()
    engine = engine_on(decoder, machine=machine, limits=QUICK)
    for prompt in prompts:
        list(engine.generate(prompt, limit(10)))
    return decoder, engine


def test_shrinking_empties_idle_caches_and_says_how_much() -> None:
    machine = Machine()
    decoder, engine = filled(machine, [PROMPT, OTHER])
    n_cached = len(PROMPT) + len(OTHER) + 2 * 9
    assert sum(map(len, decoder.caches.values())) == n_cached
    machine.free_mb = LOW_MB
    pass_time(engine, machine, 10)
    assert sum(map(len, decoder.caches.values())) == 0
    assert engine.take_pressure_news()[-1] == (
        f"{n_cached} cached tokens of 2 idle sessions dropped"
    )
    again = list(engine.generate(PROMPT, limit(30)))
    assert ids_of(again) == continuation(PROMPT, 30)
    assert again[-1].stats.n_reused == 0


def test_shrinking_leaves_running_requests_alone() -> None:
    machine, decoder, engine = slow_engine()
    list(engine.generate(OTHER, limit(3)))
    request = engine.add(PROMPT, limit(100))
    engine.step()
    machine.free_mb = SCARCE_MB
    chunks = []
    while not engine.is_idle:
        chunks += engine.step()
    assert "shrink_idle" in steps_of(engine)
    first = continuation(PROMPT, 100)
    assert first[-len(ids_of(chunks, request)) :] == ids_of(chunks, request)
    assert decoder.n_tokens("prefill") == len(PROMPT) - 1 + len(OTHER) - 1


def test_scarce_memory_refuses_new_requests_with_a_time_to_come_back() -> None:
    machine = Machine()
    _, engine = filled(machine, [PROMPT])
    machine.free_mb, machine.now_s = SCARCE_MB, 1.0
    with pytest.raises(BusyError) as refused:
        engine.add(OTHER, limit(5))
    assert str(refused.value) == (
        "free memory 100 MB is below 150 MB: new requests are refused; try again in 10 s, or go on "
        "with a running conversation"
    )
    assert refused.value.retry_s == 10
    assert engine.is_idle


def test_a_conversation_that_goes_on_is_never_refused_even_with_its_cache_emptied() -> None:
    machine = Machine()
    decoder, engine = filled(machine, [PROMPT, OTHER])
    machine.free_mb, machine.now_s = SCARCE_MB, 1.0
    with pytest.raises(BusyError):
        engine.add(list(b"somebody new"), limit(5))
    assert sum(map(len, decoder.caches.values())) == 0
    for prompt in (PROMPT, OTHER):
        # As text the reply may have other tokens, and a template may drop the prompt's end.
        turn = [*prompt[:-4], *b" reply and next question"]
        assert ids_of(list(engine.generate(turn, limit(9)))) == continuation(turn, 9)


def test_a_request_that_only_shares_its_beginning_is_new() -> None:
    machine = Machine()
    _, engine = filled(machine, [PROMPT])
    machine.free_mb, machine.now_s = SCARCE_MB, 1.0
    with pytest.raises(BusyError):
        engine.add([*PROMPT[:-5], *b"more"], limit(5))


def test_requests_that_wait_when_memory_gets_scarce_still_run() -> None:
    machine, _, engine = slow_engine(n_seq=1)
    requests = [engine.add(prompt, limit(20)) for prompt in (PROMPT, OTHER)]
    machine.free_mb = SCARCE_MB
    chunks: list[Chunk] = []
    while not engine.is_idle:
        chunks += engine.step()
    assert ids_of(chunks, requests[0]) == continuation(PROMPT, 20)
    assert ids_of(chunks, requests[1]) == continuation(OTHER, 20)


def test_an_idle_engine_lets_requests_in_again_by_being_asked() -> None:
    machine = Machine(free_mb=SCARCE_MB)
    engine = engine_on(FakeDecoder(), machine=machine)
    with pytest.raises(BusyError):
        engine.add(PROMPT, limit(5))
    machine.free_mb = FREE_MB
    machine.now_s += 2.0
    with pytest.raises(BusyError) as refused:
        engine.add(PROMPT, limit(5))
    machine.now_s += refused.value.retry_s
    assert ids_of(list(engine.generate(PROMPT, limit(5)))) == continuation(PROMPT, 5)


def test_without_limits_nothing_is_watched() -> None:
    engine = engine_on(FakeDecoder())
    assert engine.pressure == ()
    assert engine.take_pressure_news() == []


# ---------------------------------------------------------------- a drafter that does not come back


def test_a_drafter_that_cannot_be_loaded_leaves_plain_decoding_and_is_tried_again() -> None:
    machine, decoder, engine = slow_engine(limits=QUICK)
    request = engine.add(PROMPT, limit(400))
    chunks = engine.step()
    machine.free_mb = LOW_MB
    for _ in range(10):
        chunks += engine.step()
    decoder.load_fails, machine.free_mb = True, FREE_MB
    decoder.passes.clear()
    for _ in range(20):
        chunks += engine.step()
    assert engine.pressure == ()
    why = "drafter gone.gguf: the file is missing, empty or not readable"
    assert engine.speculation_state == f"drafter released: it could not be loaded again: {why}"
    assert f"the drafter could not be loaded again: {why}" in engine.take_pressure_news()
    assert decoder.n_passes("draft") == 0
    decoder.load_fails = False
    for _ in range(30):
        chunks += engine.step()
    assert engine.take_pressure_news() == ["the drafter is loaded again"]
    assert engine.speculation_state == "always on (drafter)"
    assert decoder.n_passes("draft") > 0
    while not engine.is_idle:
        chunks += engine.step()
    assert ids_of(chunks, request) == continuation(PROMPT, 400)


def test_a_drafter_that_was_switched_off_is_released_and_not_loaded_again() -> None:
    machine, decoder, engine = slow_engine(limits=QUICK, draft_fails=True)
    engine.add(PROMPT, limit(200))
    with pytest.warns(RuntimeWarning, match="speculation off"):
        engine.step()
    machine.free_mb = LOW_MB
    for _ in range(10):
        engine.step()
    assert decoder.in_memory == set()
    machine.free_mb = FREE_MB
    for _ in range(60):
        engine.step()
    assert engine.pressure == ()
    assert decoder.in_memory == set()
    assert engine.speculation_state.startswith("off: the drafter failed")
    assert "the drafter is loaded again" not in engine.take_pressure_news()


def test_room_for_the_drafter_itself_must_be_free_before_it_comes_back() -> None:
    """Context 30 MB and weights 40 MB over 375 MB, at which the pressure is gone."""
    machine = Machine(free_mb=LOW_MB)
    decoder = FakeDecoder()
    engine = engine_on(decoder, machine=machine, limits=QUICK)
    pass_time(engine, machine, 10)
    machine.free_mb = 444.0
    pass_time(engine, machine, 60)
    assert decoder.in_memory == set()
    machine.free_mb = 445.0
    pass_time(engine, machine, 20)
    assert decoder.in_memory == {"weights", "context"}


# ---------------------------------------------------------------- soak


def test_fifty_spells_of_pressure_drop_no_conversation_and_change_no_text() -> None:
    noise, machine = random.Random(4), Machine()
    decoder = ticking(machine, n_seq=3)
    engine = engine_on(decoder, machine=machine, limits=QUICK)
    prompts: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    ended: set[int] = set()
    n_refused = 0
    news: list[str] = []

    def ask() -> None:
        nonlocal n_refused
        prompt = [noise.randrange(256) for _ in range(noise.randrange(5, 60))]
        if prompts and noise.random() < 0.5:  # the next turn of a conversation that has ended
            known = [slot.prompt for slot in engine._rounds.slots.idle]
            prompt = [*noise.choice(known), *prompt] if known else prompt
        try:
            request = engine.add(prompt, limit(noise.randrange(10, 90)))
        except BusyError:
            n_refused += 1
        else:
            prompts[request], texts[request] = prompt, []

    def go_on(n_rounds: int) -> None:
        for _ in range(n_rounds):
            if len(prompts) - len(ended) < 4:
                ask()
            if engine.is_idle:
                machine.now_s += 1.0
            for chunk in engine.step():
                texts[chunk.request_id] += chunk.token_ids
                if chunk.finish_reason is not None:
                    assert chunk.finish_reason == "length"
                    ended.add(chunk.request_id)
            news.extend(engine.take_pressure_news())

    for spell in range(50):
        machine.free_mb = SCARCE_MB if spell % 2 else LOW_MB
        go_on(12)
        machine.free_mb = FREE_MB
        go_on(26)
        assert engine.pressure == (), f"spell {spell}"
    while not engine.is_idle:
        go_on(1)
        if len(ended) > 400:
            break
    for request, text in texts.items():
        assert text == continuation(prompts[request], len(text))
    assert len(ended) > 50
    assert n_refused > 10
    for step, times in (("drafting is parked", 50), ("new requests are refused", 25)):
        assert sum(line.startswith(step) for line in news) == times
        assert sum(line.startswith(f"no longer: {step}") for line in news) == times
    assert decoder.in_memory == {"weights", "context"}
