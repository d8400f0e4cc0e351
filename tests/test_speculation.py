"""Speculation on scripted drafters and given costs: lengths, parking, reasons, failures."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from fake_decoder import (
    FakeDecoder,
    FixedCost,
    letters,
    mixed,
    oracle,
    repeating,
    saying,
    silent,
    wrong,
)

from dspark_edge import SamplingParams, Stats
from dspark_edge._core import LookupIndex, SamplingConfig
from dspark_edge.cost import CostTable
from dspark_edge.recorder import RoundRecorder
from dspark_edge.sequence import Request
from dspark_edge.signals import n_same_tokens
from dspark_edge.speculation import Mode, Proposer, Speculation
from dspark_edge.text import TextStream

STEEP = FixedCost(verify_ms=(10, 25, 40, 55, 70), draft_ms=1)  # another round is cheaper
FLAT = FixedCost(verify_ms=(10, 11, 12, 13, 14), draft_ms=2)


def request_of(
    tokens: Sequence[int] = (1, 2, 3), *, seq_id: int = 0, max_tokens: int | None = None
) -> Request:
    return Request(
        id=seq_id,
        tokens=list(tokens),
        params=SamplingParams(max_tokens=max_tokens),
        sampling=SamplingConfig(),
        end_tokens=frozenset(),
        stats=Stats(),
        text=TextStream(),
        started_s=time.perf_counter(),
        seq_id=seq_id,
        lookup=LookupIndex(),
    )


def speculation_on(
    decoder: FakeDecoder,
    mode: Mode = "always",
    proposer: Proposer | None = "drafter",
    *,
    cost: CostTable = FLAT,
    verify_len: int | None = None,
    n_lookup: int = 0,
) -> Speculation:
    return Speculation(
        mode=mode,
        proposer=proposer,
        off_reason="" if proposer else "no drafter was asked for",
        drafter=decoder,
        cost=cost,
        n_max=decoder.n_draft,
        verify_len=verify_len,
        n_lookup=n_lookup,
    )


def decoder_of(requests: Sequence[Request], decoder: FakeDecoder) -> FakeDecoder:
    """The decoder with the requests' prompts in its caches."""
    for request in requests:
        decoder.caches[request.seq_id] = request.tokens[:-1]
    return decoder


def lengths(plan: Sequence[Sequence[int]]) -> list[int]:
    return [len(draft) for draft in plan]


def rounds(speculation: Speculation, request: Request, n_rounds: int) -> None:
    """Rounds that are planned and in which nothing happens."""
    for _ in range(n_rounds):
        speculation.plan([request], 512, 512)


class Simulation:
    """One request run round by round, on a clock that only its passes move."""

    def __init__(self, decoder: FakeDecoder, cost: FixedCost, mode: Mode = "auto") -> None:
        self.cost = cost
        self.request = request_of(range(5))
        self.decoder = decoder_of([self.request], decoder)
        self.speculation = speculation_on(decoder, mode, cost=cost)
        self.clock_s = 0.0
        self.n_rounds = 0

    def round(self) -> None:
        request, n_before = self.request, self.decoder.n_passes("draft")
        (draft,) = self.speculation.plan([request], self.decoder.n_ctx, self.decoder.n_batch)
        (verdict,) = self.decoder.verify([0], [[request.tokens[-1], *draft]])
        self.speculation.learn(request, len(request.tokens), verdict.tokens)
        request.tokens += verdict.tokens
        verify_s = self.cost.verify_s(1 + len(draft), 0)
        self.speculation.observe_round(
            1 + len(draft),
            len(request.tokens),
            round_s=verify_s,
            verify_s=verify_s,
            pass_s=verify_s,
        )
        self.clock_s += verify_s
        self.clock_s += self.cost.draft_s(1) * (self.decoder.n_passes("draft") - n_before)
        self.n_rounds += 1

    def run(self, n_tokens: int) -> float:
        """Seconds until n_tokens more are there."""
        start_s, end = self.clock_s, len(self.request.tokens) + n_tokens
        while len(self.request.tokens) < end:
            self.round()
        return self.clock_s - start_s


# ---------------------------------------------------------------- lengths


def test_always_verifies_the_whole_block() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder(n_draft=4))
    plan = speculation_on(decoder).plan([request], 512, 512)
    assert plan == [oracle(letters)(request.tokens, 4)]


@pytest.mark.parametrize("verify_len", range(5))
def test_always_verifies_the_length_asked_for_and_drafts_the_whole_block(verify_len: int) -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder(n_draft=4))
    plan = speculation_on(decoder, verify_len=verify_len).plan([request], 512, 512)
    assert lengths(plan) == [verify_len]
    assert request.stats.n_drafted == 4


def test_always_needs_no_cost_table() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder())
    assert lengths(speculation_on(decoder, cost=CostTable()).plan([request], 512, 512)) == [4]


@pytest.mark.parametrize("mode", ["always", "auto"])
@pytest.mark.parametrize(("n_ctx", "expected"), [(3, 0), (4, 1), (6, 3), (7, 4), (9, 4)])
def test_a_draft_shrinks_to_the_room_in_the_context(mode: Mode, n_ctx: int, expected: int) -> None:
    request = request_of([1, 2, 3])
    decoder = decoder_of([request], FakeDecoder(n_draft=4))
    plan = speculation_on(decoder, mode).plan([request], n_ctx, 512)
    assert lengths(plan) == [expected]


@pytest.mark.parametrize("mode", ["always", "auto"])
def test_a_draft_shrinks_to_max_tokens_less_the_bonus_token(mode: Mode) -> None:
    request = request_of(max_tokens=3)
    decoder = decoder_of([request], FakeDecoder(n_draft=4))
    assert lengths(speculation_on(decoder, mode).plan([request], 512, 512)) == [2]


def test_no_pass_is_spent_on_a_draft_without_room() -> None:
    request = request_of(max_tokens=1)
    decoder = decoder_of([request], FakeDecoder())
    assert speculation_on(decoder).plan([request], 512, 512) == [[]]
    assert decoder.n_passes("draft") == 0


def test_a_request_without_room_gets_its_anchor_alone_beside_one_that_has_room() -> None:
    requests = [request_of(seq_id=0, max_tokens=1), request_of(seq_id=1)]
    decoder = decoder_of(requests, FakeDecoder(n_draft=4))
    assert lengths(speculation_on(decoder).plan(requests, 512, 512)) == [0, 4]


@pytest.mark.parametrize("mode", ["always", "auto"])
@pytest.mark.parametrize("max_batch_tokens", [3, 4, 6, 11, 15, 40])
def test_a_round_never_exceeds_max_batch_tokens(mode: Mode, max_batch_tokens: int) -> None:
    requests = [request_of([seq_id, 5], seq_id=seq_id) for seq_id in range(3)]
    decoder = decoder_of(requests, FakeDecoder(n_draft=4))
    plan = speculation_on(decoder, mode).plan(requests, 512, max_batch_tokens)
    assert 3 + sum(lengths(plan)) <= max_batch_tokens


def test_auto_verifies_nothing_where_another_round_is_cheaper_than_width() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder(n_draft=4))
    assert lengths(speculation_on(decoder, "auto", cost=STEEP).plan([request], 512, 512)) == [0]


def test_auto_verifies_all_where_width_is_free() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder(n_draft=4))
    cost = FixedCost(verify_ms=(10, 10), draft_ms=1)
    assert lengths(speculation_on(decoder, "auto", cost=cost).plan([request], 512, 512)) == [4]


# ---------------------------------------------------------------- lookup


def test_lookup_proposes_what_followed_the_same_tokens() -> None:
    request = request_of([1, 2, 3, 4, 5, 1, 2])
    plan = speculation_on(FakeDecoder(n_draft=3), proposer="lookup").plan([request], 512, 512)
    assert plan == [[3, 4, 5]]


@pytest.mark.parametrize(("mode", "n_verified"), [("auto", 16), ("always", 8)])
def test_only_auto_verifies_a_long_lookup(mode: Mode, n_verified: int) -> None:
    request = request_of([*range(60), 99, *range(20)])
    cost = FixedCost(verify_ms=(10, 10))
    decoder = FakeDecoder(n_draft=8)
    speculation = speculation_on(decoder, mode, "lookup", cost=cost, n_lookup=16)
    assert lengths(speculation.plan([request], 512, 512)) == [n_verified]


def test_lookup_follows_the_text_as_it_grows() -> None:
    request = request_of([1, 2, 3])
    speculation = speculation_on(FakeDecoder(n_draft=2), proposer="lookup")
    assert speculation.plan([request], 512, 512) == [[]]
    request.tokens += [9, 1, 2]
    assert speculation.plan([request], 512, 512) == [[3, 9]]


def test_lookup_spends_no_pass_and_no_silence() -> None:
    request = request_of([1, 2, 3])
    decoder = FakeDecoder()
    speculation = speculation_on(decoder, proposer="lookup")
    for _ in range(60):
        assert speculation.plan([request], 512, 512) == [[]]
    assert decoder.passes == []
    assert speculation.reason == "always on (lookup)"


def test_lookup_that_is_never_right_is_no_longer_verified() -> None:
    cost = FixedCost(verify_ms=(10, 12, 14, 16, 18))
    speculation = speculation_on(FakeDecoder(n_draft=4), "auto", "lookup", cost=cost)
    request = request_of([1, 2, 3] * 4)
    for n in range(60):
        speculation.plan([request], 10_000, 512)
        new = [100 + n, 1, 2]  # a match each time, and each time the text goes on otherwise
        speculation.learn(request, len(request.tokens), new)
        speculation.observe_round(1, len(request.tokens), round_s=0.01, verify_s=0.01, pass_s=0.01)
        request.tokens += new
    assert lengths(speculation.plan([request], 10_000, 512)) == [0]


# ---------------------------------------------------------------- reasons


def test_every_state_says_its_reason() -> None:
    decoder = FakeDecoder()
    assert speculation_on(decoder).reason == "always on (drafter)"
    assert speculation_on(decoder, proposer="lookup").reason == "always on (lookup)"
    assert speculation_on(decoder, "auto").reason == "drafting: on trial (0 of 8 drafts)"
    lookup = speculation_on(decoder, "auto", "lookup")
    assert lookup.reason == "lookup: verifies a match where that pays"
    assert speculation_on(decoder, proposer=None).reason == "off: no drafter was asked for"


def test_mode_off_never_drafts_though_a_drafter_is_there() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder())
    speculation = speculation_on(decoder, "off")
    assert speculation.plan([request], 512, 512) == [[]]
    assert speculation.proposer is None
    assert decoder.passes == []


def test_turned_off_it_plans_anchors_alone_and_says_why() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder())
    speculation = speculation_on(decoder)
    speculation.turn_off("memory is short")
    assert speculation.plan([request], 512, 512) == [[]]
    assert speculation.reason == "off: memory is short"


def test_a_failing_drafter_is_turned_off_with_a_warning_and_not_asked_again() -> None:
    requests = [request_of(seq_id=seq_id) for seq_id in range(2)]
    decoder = decoder_of(requests, FakeDecoder(draft_fails=True))
    speculation = speculation_on(decoder)
    with pytest.warns(RuntimeWarning, match="speculation off: the drafter failed: the drafter's"):
        assert speculation.plan(requests, 512, 512) == [[], []]
    assert speculation.plan(requests, 512, 512) == [[], []]
    assert decoder.n_passes("draft") == 1
    assert speculation.reason == "off: the drafter failed: the drafter's cache is broken"


def test_a_silent_drafter_is_turned_off_after_50_rounds_with_a_warning() -> None:
    request = request_of()
    decoder = decoder_of([request], FakeDecoder(drafter=silent))
    speculation = speculation_on(decoder)
    for _ in range(49):
        assert speculation.plan([request], 512, 512) == [[]]
    with pytest.warns(RuntimeWarning, match="speculation off: the drafter proposed nothing in 50"):
        speculation.plan([request], 512, 512)
    assert speculation.reason == "off: the drafter proposed nothing in 50 rounds"


@pytest.mark.parametrize(
    ("decoder", "n_drafts", "why"),
    [
        (FakeDecoder(draft_fails=True), 1, "the drafter failed: the drafter's cache is broken"),
        (FakeDecoder(drafter=silent), 50, "the drafter proposed nothing in 50 rounds"),
    ],
)
def test_lookup_goes_on_without_a_drafter_that_is_lost(
    decoder: FakeDecoder, n_drafts: int, why: str
) -> None:
    request = request_of([1, 2, 3, 4, 5])
    cost = FixedCost(verify_ms=(10, 10))
    speculation = speculation_on(decoder_of([request], decoder), "auto", cost=cost, n_lookup=3)
    with pytest.warns(RuntimeWarning, match=f"speculation with lookup alone: {why}"):
        rounds(speculation, request, 2000)  # probes of a silent one among them
    request.tokens += [1, 2]
    assert speculation.plan([request], 512, 512) == [[3, 4, 5]]
    speculation.switch("always")
    assert speculation.plan([request], 512, 512) == [[3, 4, 5]]
    assert decoder.n_passes("draft") == n_drafts
    speculation.released = "memory is short"  # what is lost tells more
    assert (speculation.proposer, speculation.reason) == ("lookup", f"{why}, lookup goes on")


# ---------------------------------------------------------------- learning


def test_acceptance_by_position_counts_what_the_text_says_of_each_draft() -> None:
    simulation = Simulation(FakeDecoder(target=letters, n_draft=4), FLAT, "always")
    simulation.run(50)
    simulation.speculation.finish(simulation.request)
    by_position = simulation.speculation.acceptance_by_position
    assert by_position == [(10, 10)] * 4


def test_draft_tokens_that_were_not_verified_are_learned_from_too() -> None:
    decoder = FakeDecoder(n_draft=4)
    request = request_of()
    speculation = speculation_on(decoder_of([request], decoder), verify_len=0)
    speculation.plan([request], 512, 512)
    speculation.learn(request, len(request.tokens), oracle(letters)(request.tokens, 4))
    speculation.finish(request)
    assert speculation.acceptance_by_position == [(1, 1)] * 4


def test_the_drafter_and_lookup_are_compared_before_either_is_taken() -> None:
    request = request_of([3, 4, 5, 6, 3, 4])
    decoder = decoder_of([request], FakeDecoder(n_draft=2, drafter=oracle(letters)))
    speculation = Speculation(
        mode="auto",
        proposer="drafter",
        off_reason="",
        drafter=decoder,
        cost=FLAT,
        n_max=2,
        n_lookup=3,
    )
    speculation.plan([request], 512, 512)
    speculation._settle()
    looked, drafted = (signals for _, signals, _ in request.ledger._open)
    assert (looked.tokens, drafted.tokens) == ([5, 6, 3], oracle(letters)(request.tokens, 2))
    assert looked.rival is not None
    assert drafted.rival is not None
    n_same = n_same_tokens(looked.tokens, drafted.tokens)
    assert looked.rival.n_same == drafted.rival.n_same == n_same


def test_lookup_is_told_how_the_last_copies_of_its_request_went() -> None:
    request = request_of([3, 4, 5, 6, 3, 4])
    request.ledger.recent_lookup, request.ledger.recent_copies = 0.25, 0.75
    speculation = speculation_on(FakeDecoder(n_draft=3), "auto", "lookup")
    (looked,) = speculation._look_up([request])
    assert (looked.recent, looked.recent_copies) == (0.25, 0.75)


def test_what_is_verified_nowhere_is_proposed_by_lookup_too_for_the_record() -> None:
    request = request_of([1, 2, 3, 4, 5, 1, 2])
    decoder = decoder_of([request], FakeDecoder(n_draft=2))
    speculation = Speculation(
        mode="always",
        proposer="drafter",
        off_reason="",
        drafter=decoder,
        cost=FLAT,
        n_max=2,
        verify_len=0,
        n_lookup=3,
    )
    assert speculation.lookup_index() is not None
    recorder = speculation.recorder = RoundRecorder()
    assert speculation.plan([request], 512, 512) == [[]]
    assert [(b.proposer, b.tokens) for b in recorder._blocks[request.id]] == [
        ("lookup", [3, 4, 5]),
        ("drafter", oracle(letters)(request.tokens, 2)),
    ]


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_trace_names_the_drafter_where_lookup_begins_alike(mode: Mode) -> None:
    request = request_of([3, 4, 5, 6, 3, 4])
    decoder = decoder_of([request], FakeDecoder(n_draft=2, drafter=lambda *_: [5, 7]))
    speculation = speculation_on(decoder, mode, n_lookup=2)
    recorder = speculation.recorder = RoundRecorder()
    assert speculation.plan([request], 512, 2) == [[5]]
    recorder.gain(request, 6, [5, 8], [4, 5], 1)
    assert recorder._sequences[0].proposer == "drafter"


def test_a_trace_names_nobody_where_the_anchor_went_alone() -> None:
    request = request_of([3, 4, 5, 6, 3, 4])
    speculation = speculation_on(decoder_of([request], FakeDecoder(n_draft=2)), n_lookup=2)
    recorder = speculation.recorder = RoundRecorder()
    speculation.plan([request], 512, 512)
    recorder.gain(request, 6, [5], [4], 0)  # what was planned failed
    assert recorder._sequences[0].proposer is None


def test_times_are_taken_only_while_something_speculates() -> None:
    cost = CostTable()
    speculation = speculation_on(FakeDecoder(), cost=cost)
    for _ in range(2):
        speculation.observe_round(1, 0, round_s=0.75, verify_s=0.5, pass_s=0.25)
    speculation.turn_off("a reason")
    speculation.observe_round(1, 0, round_s=9.0, verify_s=7.0, pass_s=5.0)
    assert (cost.verify_s(1, 0), cost.other_s) == (0.25, 0.25)


def test_of_equal_short_passes_only_some_correct_the_cost_table() -> None:
    heard: list[tuple[int, float]] = []

    class Heard(FixedCost):
        def observe_verify(self, batch_tokens: int, depth: int, seconds: float) -> None:
            heard.append((batch_tokens, seconds))

    cost = Heard(verify_ms=(10, 15), draft_ms=5)
    speculation = speculation_on(FakeDecoder(), cost=cost)
    for n, pass_s in [(1, 0.010)] * 7 + [(2, 0.015), (1, 0.010), (1, 0.010), (1, 0.100)]:
        speculation.observe_round(n, 0, round_s=pass_s, verify_s=pass_s, pass_s=pass_s)
    speculation._settle()
    # The first, one in 30 ms of its like, and whatever is not like the one before.
    assert heard == [
        (1, 0.010),
        (1, 0.010),
        (1, 0.010),
        (2, 0.015),
        (1, 0.010),
        (1, 0.100),
    ]


def test_the_own_time_of_the_first_round_is_not_that_of_a_round() -> None:
    """It holds the lookup index of the whole prompt, and what is made once."""
    cost = CostTable()
    speculation = speculation_on(FakeDecoder(), cost=cost)
    for own_s in (0.014, 0.00025):
        speculation.observe_round(1, 0, round_s=0.5 + own_s, verify_s=0.5, pass_s=0.5)
    assert cost.other_s == pytest.approx(0.00025)


# ---------------------------------------------------------------- parking: scenario 13


def test_a_wrong_drafter_costs_at_most_a_tenth_over_300_tokens() -> None:
    cost = FixedCost(verify_ms=(10, 15, 20, 25, 30), draft_ms=5)
    simulation = Simulation(FakeDecoder(drafter=wrong(letters), n_ctx=4096), cost)
    assert simulation.run(300) <= 1.10 * 300 * cost.verify_s(1, 0)
    assert simulation.speculation.reason.startswith("parked: drafting promises 0.")


def test_parked_it_stays_within_3_percent_of_plain_decoding() -> None:
    cost = FixedCost(verify_ms=(10, 15, 20, 25, 30), draft_ms=5)
    simulation = Simulation(FakeDecoder(drafter=wrong(letters), n_ctx=8192), cost)
    simulation.run(100)  # the first second
    assert simulation.run(1000) <= 1.03 * 1000 * cost.verify_s(1, 0)


def test_a_dear_drafter_is_probed_so_seldom_that_probes_cost_2_percent() -> None:
    cost = FixedCost(verify_ms=(10, 15, 20, 25, 30), draft_ms=40)
    simulation = Simulation(FakeDecoder(drafter=wrong(letters), n_ctx=8192), cost)
    simulation.run(200)
    assert simulation.run(2000) <= 1.03 * 2000 * cost.verify_s(1, 0)


def test_a_prompt_is_for_the_drafter_unless_that_rests() -> None:
    cost = FixedCost(verify_ms=(10, 15, 20, 25, 30), draft_ms=5)
    simulation = Simulation(FakeDecoder(drafter=wrong(letters), n_ctx=4096), cost)
    speculation = simulation.speculation
    assert speculation.will_draft(1)  # on trial
    simulation.run(100)
    assert speculation.reason.startswith("parked")
    assert not speculation.will_draft(1)
    decoder = FakeDecoder()
    always = speculation_on(decoder)
    assert always.will_draft(1)
    always.released = "no memory"
    assert not always.will_draft(1)
    always.released, always.held = "", "memory is short"
    assert not always.will_draft(1)
    assert not speculation_on(decoder, "always", "lookup").will_draft(1)
    assert not speculation_on(decoder, "off").will_draft(1)


def test_when_the_drafter_becomes_right_drafting_resumes_within_3_probe_periods() -> None:
    cost = FixedCost(verify_ms=(10, 11, 12, 13, 14), draft_ms=5)
    decoder = FakeDecoder(drafter=wrong(letters), n_ctx=8192)
    simulation = Simulation(decoder, cost)
    simulation.run(300)
    assert simulation.speculation.reason.startswith("parked")
    decoder.drafter = oracle(letters)
    start = simulation.n_rounds
    while simulation.speculation.reason.startswith("parked"):
        simulation.round()
        # Two drafts take 10 ms of 10, and probes may cost half a percent: one in 200 rounds.
    assert simulation.n_rounds - start <= 3 * 200
    assert simulation.run(500) < 0.6 * 500 * cost.verify_s(1, 0)


def test_a_good_drafter_is_never_parked() -> None:
    cost = FixedCost(verify_ms=(10, 11, 12, 13, 14), draft_ms=2)
    simulation = Simulation(FakeDecoder(drafter=mixed(letters, 0.8), n_ctx=8192), cost)
    simulation.run(1000)
    assert simulation.speculation.reason.startswith("drafting: promises")
    assert simulation.clock_s < 0.7 * 1000 * cost.verify_s(1, 0)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "verify_ms",
    [(10, 10, 10, 10, 10), (10, 12, 14, 16, 18), (10, 20, 30, 40, 50), (10, 22, 26, 41, 18)],
)
def test_auto_is_never_more_than_5_percent_slower_than_plain(
    rho: float, verify_ms: Sequence[float]
) -> None:
    cost = FixedCost(verify_ms=verify_ms, draft_ms=4)
    simulation = Simulation(FakeDecoder(drafter=mixed(letters, rho), n_ctx=8192), cost)
    simulation.run(100)
    assert simulation.run(1000) <= 1.05 * 1000 * cost.verify_s(1, 0)


def test_the_time_of_a_probe_is_not_taken_for_the_cost_of_a_draft() -> None:
    class Counting(FixedCost):
        n_drafts = 0

        def observe_draft(self, n_seq: int, seconds: float) -> None:
            self.n_drafts += 1

    cost = Counting(verify_ms=(10, 15, 20, 25, 30), draft_ms=5)
    decoder = FakeDecoder(drafter=wrong(letters), n_ctx=4096)
    Simulation(decoder, cost).run(300)
    # The trial, and the second draft of each probe: the first one begins with an injection.
    assert decoder.n_passes("draft") == 8 + 2 * (cost.n_drafts - 8) > 8


def test_a_target_that_repeats_itself_is_drafted_by_the_oracle_as_any_other() -> None:
    target = repeating(3)
    simulation = Simulation(FakeDecoder(target=target, n_ctx=8192), FLAT)
    simulation.run(100)
    assert simulation.request.tokens[5:105] == oracle(target)(range(5), 100)


def test_a_text_that_ends_inside_a_draft_counts_for_the_slots_it_has_reached() -> None:
    target = saying("ab", 5)
    simulation = Simulation(FakeDecoder(target=target, n_draft=4), FLAT, "always")
    simulation.round()
    simulation.speculation.finish(simulation.request)
    assert simulation.speculation.acceptance_by_position == [(1, 1), (1, 1), (1, 1), (0, 0)]


def test_a_live_switch_takes_effect_with_the_next_round_and_back() -> None:
    decoder = FakeDecoder(drafter=oracle(letters))
    requests = [request_of()]
    decoder_of(requests, decoder)
    speculation = speculation_on(decoder)
    assert lengths(speculation.plan(requests, 512, 512)) == [4]
    speculation.switch("off")
    assert lengths(speculation.plan(requests, 512, 512)) == [0]
    assert speculation.reason == "off: switched off"
    speculation.switch("always")
    assert lengths(speculation.plan(requests, 512, 512)) == [4]


@pytest.mark.parametrize(
    ("mode", "proposer", "wanted", "why"),
    [
        ("always", "drafter", "auto", "no pass was profiled"),
        ("auto", None, "always", "no drafter was asked for"),
        ("off", "drafter", "always", "it is off"),
        ("auto", "drafter", "sometimes", "must be auto, always or off"),
    ],
)
def test_a_switch_that_was_not_prepared_says_why_and_changes_nothing(
    mode: Mode, proposer: Proposer | None, wanted: Mode, why: str
) -> None:
    speculation = speculation_on(FakeDecoder(), mode, proposer)
    before = speculation.reason
    with pytest.raises(ValueError, match=why):
        speculation.switch(wanted)
    assert (speculation.mode, speculation.reason) == (mode, before)
