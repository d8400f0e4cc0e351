"""Who drafts for whom: worth against price, per sequence, per number of sequences, and the bar."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dspark_edge.competition import WORTH_DRAFTS, Competition
from dspark_edge.parking import Parking

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
        Parking().start([])


def test_a_probe_asks_for_one_sequence_and_each_in_turn() -> None:
    competition = Competition(STEEP, typical=[POOR] * 64)
    asked = [wanted for wanted in run(competition, [POOR] * 3, 6 * 32) if wanted]
    assert asked == [[1], [2], [0]] * 2


def test_a_drafter_that_pays_again_is_found_by_its_probes() -> None:
    competition = Competition(FLAT, typical=[POOR] * 64)
    asked = run(competition, [SURE] * 4, 3 * 32 + 1)
    assert asked[-1] == [0, 1, 2, 3]


def probed_in(competition: Competition, n_rounds: int, probe_s: float) -> list[int]:
    """The rounds, from 1, in which a useless drafter was probed, each probe taking probe_s."""
    probed = []
    for n in range(1, n_rounds + 1):
        if wants(competition):
            probed.append(n)
            competition.observe_probe(probe_s)
        competition.choose({0: POOR} if probed[-1:] == [n] else {})
    return probed


def test_probes_are_as_rare_as_their_measured_time_asks() -> None:
    """A probe injects what piled up while parked: here that is eight times a draft."""
    competition = Competition(STEEP, typical=[POOR] * 64)
    # 0.02 s are half a percent of 400 rounds of 0.01 s
    assert probed_in(competition, 1300, 0.02) == [50, 450, 850, 1250]


@pytest.mark.parametrize("n_before", [0, 530])
def test_one_slow_probe_does_not_wedge_a_parked_drafter(n_before: int) -> None:
    competition = Competition(STEEP, typical=[POOR] * 64)
    probed_in(competition, n_before, 0.012)
    assert len(probed_in(competition, 250, 2.5)) == 1
    assert probed_in(competition, 512, 0.012)
    probed_in(competition, 1000, 0.012)
    # 0.012 s are half a percent of 240 rounds: the slow one is all but forgotten.
    assert len(probed_in(competition, 750, 0.012)) == 3


def test_a_draft_that_is_dear_itself_is_probed_as_rarely_as_that_asks() -> None:
    competition = Competition(Line(more_s=0.009, pass_s=0.05), typical=[POOR] * 64)
    assert probed_in(competition, 2500, 0.0505) == [1010, 2020]
