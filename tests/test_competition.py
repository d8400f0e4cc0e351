"""Who drafts for whom: worth against price, per sequence, per number of sequences, and the bar."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest

from dspark_edge.competition import SETTLED_ROUNDS, Competition
from dspark_edge.parking import Parking
from dspark_edge.probing import NEWCOMER_ROUNDS, PROBE_DRAFTS
from dspark_edge.worth import WORTH_DRAFTS

SURE, POOR = (0.9, 0.8, 0.7, 0.6), (0.1, 0.01, 0.001, 0.0001)


@dataclass(slots=True)
class Line:
    """A target pass costs first_s, and more_s for each token but one; a draft pass_s and each_s."""

    first_s: float = 0.010
    more_s: float = 0.001
    pass_s: float = 0.002
    each_s: float = 0.0005
    other_s: float = 0.0003

    def verify_s(self, batch_tokens: int, depth: int) -> float:
        return self.first_s + (batch_tokens - 1) * self.more_s

    def draft_s(self, n_seq: int) -> float:
        return self.pass_s + n_seq * self.each_s


FLAT, STEEP = Line(), Line(more_s=0.009)


def wants(
    competition: Competition, n_seq: int = 1, lookup: list[tuple[float, ...]] | None = None
) -> list[int]:
    return competition.wants(
        list(range(n_seq)), lookup or [()] * n_seq, depth=100, max_batch_tokens=512
    )


def run(competition: Competition, rows: list[tuple[float, ...]], n_rounds: int) -> list[list[int]]:
    """Rounds in which each sequence's drafter offers its row; returns whom each drafted for."""
    asked = []
    for _ in range(n_rounds):
        asked.append(wants(competition, len(rows)))
        competition.choose({r: rows[r] for r in asked[-1]})
    return asked


def test_without_a_drafter_nothing_is_drafted() -> None:
    assert wants(Competition(FLAT, has_drafter=False)) == []


def test_a_round_that_may_verify_nothing_drafts_nothing() -> None:
    competition = Competition(FLAT)
    assert competition.wants([0, 1], [(), ()], depth=0, max_batch_tokens=2) == []


def test_choosing_before_asking_is_refused() -> None:
    with pytest.raises(ValueError, match="no round has begun"):
        Competition(FLAT).choose({})


def test_the_better_of_two_offers_is_taken() -> None:
    competition = Competition(FLAT)
    wants(competition, 3, [SURE, POOR, ()])
    choice = competition.choose({0: POOR, 1: SURE, 2: SURE})
    assert choice.takes_draft == [False, True, True]
    assert choice.plan.verify_lens == (4, 4, 4)


@dataclass(slots=True)
class CountedLine(Line):
    asked: list[int] = field(default_factory=list)

    def verify_s(self, batch_tokens: int, depth: int) -> float:
        self.asked.append(batch_tokens)
        return Line.verify_s(self, batch_tokens, depth)


def test_a_round_asks_for_the_time_of_each_width_once() -> None:
    costs = CountedLine()
    competition = Competition(costs)
    drafting = wants(competition, 16, [SURE] * 16)
    assert drafting == list(range(16))
    competition.choose(dict.fromkeys(drafting, (*SURE, 0.5)))
    n_asked = Counter(costs.asked)
    assert set(n_asked) == set(range(16, 16 + 16 * 5 + 1))
    # Two proposals are weighed, alone and together; once more: what pays for a probe.
    assert {width for width, n in n_asked.items() if n > 1} == {16}
    assert n_asked[16] == 2


def test_lookup_alone_is_weighed_without_a_draft() -> None:
    competition = Competition(FLAT, has_drafter=False)
    wants(competition, 2, [SURE, POOR])
    choice = competition.choose({})
    assert choice.takes_draft == [False, False]
    assert choice.plan.verify_lens == (4, 0)


def test_a_calibration_that_promises_nothing_parks_before_the_first_draft() -> None:
    competition = Competition(STEEP, typical=[POOR] * 64)
    assert wants(competition) == []
    assert competition.reason.startswith("parked: drafting promises 0.8")
    assert competition.reason.endswith("(by its calibration)")


def test_a_calibration_that_promises_drafts_from_the_first_round() -> None:
    competition = Competition(FLAT, typical=[SURE] * 64)
    assert wants(competition) == [0]
    assert competition.reason.startswith("drafting: promises 2.45x")


def test_each_number_of_sequences_has_a_state_of_its_own() -> None:
    # One sequence pays for the pass; of eight each pays little, and more tokens cost more time.
    costs = Line(more_s=0.006, pass_s=0.0005, each_s=0.003)
    competition = Competition(costs)
    run(competition, [SURE], 64)
    assert competition.reason.startswith("drafting")
    assert wants(competition, 8) == []
    assert competition.reason.startswith("parked")
    assert wants(competition, 1) == [0]


def test_a_poor_sequence_is_parked_and_the_others_go_on() -> None:
    competition = Competition(FLAT)
    asked = run(competition, [SURE, POOR, SURE], 30)
    assert asked[:WORTH_DRAFTS] == [[0, 1, 2]] * WORTH_DRAFTS
    assert asked[WORTH_DRAFTS:] == [[0, 2]] * (30 - WORTH_DRAFTS)
    assert competition.reason.endswith(", 1 sequences parked")


def test_a_parked_sequence_is_probed_and_comes_back() -> None:
    competition = Competition(FLAT)
    run(competition, [SURE, POOR], 20)
    asked = run(competition, [SURE, SURE], 4 * 32)
    first = asked.index([0, 1])
    assert first < 32
    assert asked[-1] == [0, 1]
    assert not competition.reason.endswith("parked")


def test_what_ended_is_forgotten() -> None:
    competition = Competition(FLAT)
    run(competition, [SURE, POOR], 20)
    competition.finish(1)
    assert wants(competition, 2) == [0, 1]


def test_a_strong_match_saves_the_drafters_pass() -> None:
    competition = Competition(FLAT)
    run(competition, [(0.6, 0.4, 0.2, 0.1)], 20)
    assert wants(competition, 1, [SURE]) == []
    competition.choose({})
    assert wants(competition, 1, [()]) == [0]


def test_a_bar_parks_what_promises_less() -> None:
    promising = [(0.6, 0.4, 0.2, 0.1)] * 64
    assert Competition(FLAT, typical=promising).reason.startswith("drafting")
    barred = Competition(FLAT, typical=promising)
    barred.bar = 1.5
    assert barred.reason.startswith("parked")


def test_a_start_needs_rounds() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        Parking().start([], "by others")


def test_a_probe_asks_for_one_sequence_and_each_in_turn() -> None:
    competition = Competition(STEEP, typical=[POOR] * 64)
    asked = [wanted for wanted in run(competition, [POOR] * 3, 9 * 150) if wanted]
    newcomers = [[r] for r in range(3) for _ in range(PROBE_DRAFTS)]
    assert asked[: len(newcomers)] == newcomers
    later = [r for (r,) in asked[len(newcomers) :: PROBE_DRAFTS]]
    assert len(later) >= 3
    assert all(b == (a + 1) % 3 for a, b in itertools.pairwise(later))


def test_a_drafter_that_pays_again_is_found_by_its_probes() -> None:
    competition = Competition(FLAT, typical=[POOR] * 64)
    asked = run(competition, [SURE] * 4, 3 * 32 + 1)
    assert asked[-1] == [0, 1, 2, 3]


def test_the_first_token_of_a_parked_request_waits_for_no_probe() -> None:
    competition = Competition(STEEP, typical=[POOR] * 64)
    asked = run(competition, [POOR], NEWCOMER_ROUNDS + 1)
    assert asked == [[]] * NEWCOMER_ROUNDS + [[0]]


def answer(competition: Competition, key: str, row: tuple[float, ...], n_rounds: int) -> list[bool]:
    """One request of so many rounds: in which of them it was drafted for."""
    drafted = []
    for _ in range(n_rounds):
        wanted = competition.wants([key], [()], depth=100, max_batch_tokens=512)
        drafted.append(bool(wanted))
        competition.choose({r: row for r in wanted})
    competition.finish(key)
    return drafted


def test_a_good_request_after_poor_ones_is_drafted_for_from_its_first_probe_on() -> None:
    costs = Line(more_s=0.001)
    competition = Competition(costs)
    for i in range(6):
        answer(competition, f"poor {i}", POOR, 300)
    assert competition.reason.startswith("parked")
    drafted = answer(competition, "good", SURE, 100)
    assert drafted[NEWCOMER_ROUNDS:] == [True] * (100 - NEWCOMER_ROUNDS)


def test_a_poor_request_after_good_ones_is_parked_on_its_own_account() -> None:
    competition = Competition(FLAT)
    for i in range(6):
        assert all(answer(competition, f"good {i}", SURE, 60))
    drafted = answer(competition, "poor", POOR, 300)
    assert drafted[0]
    assert sum(drafted) < 60
    assert all(answer(competition, "good again", SURE, 60))


def test_where_requests_come_and_go_what_was_missed_is_not_injected_for_a_few_rounds() -> None:
    """Catching up at every change would cost more than the rounds until the next can win."""
    competition = Competition(FLAT)
    keys = ["a", "b", "c"]

    def drafted(n_rounds: int) -> list[int]:
        counts = []
        for _ in range(n_rounds):
            wanted = competition.wants(keys, [()] * len(keys), depth=100, max_batch_tokens=512)
            counts.append(len(wanted))
            competition.choose(dict.fromkeys(wanted, SURE))
        return counts

    assert drafted(5) == [3] * 5
    for worth in competition._worth.values():
        worth.n_idle = 100  # as after a while in which nobody was drafted for
    keys.append("d")
    assert drafted(SETTLED_ROUNDS) == [1] * SETTLED_ROUNDS  # the new one missed nothing
    assert drafted(1) == [4]
    assert competition.is_probe  # the injection is not taken for the cost of a draft
    assert drafted(1) == [4]
    assert not competition.is_probe


def probed_in(competition: Competition, n_rounds: int, probe_s: float) -> list[int]:
    """The rounds, from 1, in which a useless drafter was probed; a probe's first draft takes
    probe_s, with its injection."""
    probed = []
    for n in range(1, n_rounds + 1):
        wanted = wants(competition)
        if wanted and competition.is_probe:
            probed.append(n)
            competition.observe_probe(probe_s)
        competition.choose({0: POOR} if wanted else {})
    return probed


def test_probes_are_as_rare_as_their_measured_time_asks() -> None:
    """A probe injects what piled up while parked: here that is eight times a draft."""
    competition = Competition(STEEP, typical=[POOR] * 64)
    # 0.02 s and a draft of 0.0025 are half a percent of 450 rounds of 0.01 s; the newcomer's probe
    # is borrowed, and its second draft pays for none.
    newcomer, *others = probed_in(competition, 3000, 0.02)
    assert newcomer == NEWCOMER_ROUNDS + 1
    assert others[0] > 450
    assert {b - a for a, b in itertools.pairwise(others)} == {451}


@pytest.mark.parametrize("n_before", [0, 530])
def test_one_slow_probe_does_not_wedge_a_parked_drafter(n_before: int) -> None:
    competition = Competition(STEEP, typical=[POOR] * 64)
    probed_in(competition, n_before, 0.012)
    assert len(probed_in(competition, 300, 2.5)) == 1
    assert probed_in(competition, 2 * 512, 0.012)
    probed_in(competition, 1500, 0.012)
    # 0.0145 s are half a percent of 290 rounds: the slow one is all but forgotten.
    assert len(probed_in(competition, 900, 0.012)) >= 3


def test_a_draft_that_is_dear_itself_is_probed_as_rarely_as_that_asks() -> None:
    competition = Competition(Line(more_s=0.009, pass_s=0.05), typical=[POOR] * 64)
    # Two of 0.0505 s are half a percent of 2020 rounds.
    assert probed_in(competition, 6100, 0.0505) == [NEWCOMER_ROUNDS + 1, 4041, 6062]
