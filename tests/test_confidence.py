"""Calibration from signals to survival, and drafts resolved against the emitted text."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_edge.confidence import (
    FEATURES,
    LOOKUP_BIASES,
    LOOKUP_PRIOR,
    SurvivalModel,
    prior,
    prior_precision,
)
from dspark_edge.ledger import DraftLedger
from dspark_edge.signals import DraftSignals

Decided = list[tuple[DraftSignals, int, int]]


def a_draft(n: int, *, confidence: float | None = None, certainty: float = 1.0) -> DraftSignals:
    head = None if confidence is None else [confidence] * n
    return DraftSignals(tokens=list(range(n)), confidence=head, certainty=[certainty] * n)


def test_without_a_head_a_slot_starts_at_one_half() -> None:
    assert SurvivalModel(3).survival(a_draft(3)) == [0.5, 0.25, 0.125]


def test_a_head_is_believed_with_scepticism() -> None:
    (a,) = SurvivalModel(1).survival(a_draft(1, confidence=0.9))
    assert a == pytest.approx(9**0.7 / (9**0.7 + 1))
    assert 0.8 < a < 0.9


def test_a_wider_margin_promises_more() -> None:
    model = SurvivalModel(1)
    low, middle, high = (model.survival(a_draft(1, certainty=m))[0] for m in (0.0, 1.0, 8.0))
    assert low < middle < high


def test_a_longer_match_promises_more() -> None:
    model = SurvivalModel(1)
    short, long = (
        model.survival(DraftSignals([5], confidence=None, certainty=[], match_len=n))[0]
        for n in (2, 16)
    )
    bias, weight = LOOKUP_BIASES[0], LOOKUP_PRIOR[0]
    assert short == pytest.approx(1 / (1 + math.exp(-bias - weight * math.log(3) / math.log(17))))
    assert long == pytest.approx(1 / (1 + math.exp(-bias - weight)))


def test_a_token_that_mostly_followed_promises_more() -> None:
    model = SurvivalModel(1)
    rare, usual, silent = (
        model.survival(DraftSignals([5], confidence=None, certainty=odds, match_len=4))[0]
        for odds in ([-2.0], [2.0], [])
    )
    assert rare < silent < usual


def test_an_empty_draft_has_no_survival() -> None:
    assert SurvivalModel(7).survival(DraftSignals([], confidence=None, certainty=[])) == []


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, math.inf)), min_size=1, max_size=7),
    st.integers(0, 7),
)
def test_survival_stays_inside_0_and_1_and_never_rises(
    slots: list[tuple[float, float]], n_correct: int
) -> None:
    signals = DraftSignals(
        tokens=[0] * len(slots),
        confidence=[c for c, _ in slots],
        certainty=[m for _, m in slots],
    )
    model = SurvivalModel(7)
    for _ in range(20):
        survival = model.survival(signals)
        assert all(0.0 < a < 1.0 for a in survival)
        assert sorted(survival, reverse=True) == survival
        model.observe(signals, min(n_correct, len(slots)), len(slots))


def test_signals_that_are_not_numbers_say_nothing() -> None:
    model = SurvivalModel(1)
    broken = a_draft(1, confidence=math.nan, certainty=math.nan)
    assert model.survival(broken) == [0.5]
    model.observe(broken, 0, 1)
    assert 0.0 < model.survival(a_draft(1))[0] < 0.5


def test_only_decided_slots_are_counted() -> None:
    model = SurvivalModel(4)
    model.observe(a_draft(4), 2, 4)
    model.observe(a_draft(4), 1, 1)
    model.observe(a_draft(4), 4, 4)
    assert model.acceptance_by_position == [(3, 3), (2, 2), (1, 2), (1, 1)]


def test_a_draft_of_which_nothing_was_seen_teaches_nothing() -> None:
    model = SurvivalModel(2)
    model.observe(a_draft(2), 0, 0)
    assert model.survival(a_draft(2)) == [0.5, 0.25]
    assert model.acceptance_by_position == [(0, 0), (0, 0)]


def test_a_wrong_drafter_is_found_out_within_a_few_drafts() -> None:
    model = SurvivalModel(7)
    for _ in range(8):
        model.observe(a_draft(7, confidence=0.95), 0, 7)
    assert model.survival(a_draft(7, confidence=0.95))[0] < 0.25


def test_one_right_draft_restores_trust_after_many_wrong_ones() -> None:
    model = SurvivalModel(7)
    for _ in range(200):
        model.observe(a_draft(7), 0, 7)
    distrusted = model.survival(a_draft(7))[0]
    model.observe(a_draft(7), 7, 7)
    assert distrusted < 0.03
    assert model.survival(a_draft(7))[0] > 5 * distrusted


def expected_calibration_error(pairs: list[tuple[float, bool]]) -> float:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for a, survived in pairs:
        bins.setdefault(min(int(a * 10), 9), []).append((a, survived))
    gaps = (abs(sum(a for a, _ in b) - sum(s for _, s in b)) for b in bins.values())
    return sum(gaps) / len(pairs)


@pytest.mark.parametrize("has_head", [True, False])
def test_an_overconfident_drafter_is_calibrated(has_head: bool) -> None:
    """True chance per slot is 0.4 + 0.5 q, the head says 0.9 + 0.1 q, the margin follows q."""
    draw = random.Random(7)
    model = SurvivalModel(5)
    held_out: list[tuple[float, bool]] = []
    for i in range(6000):
        quality = [draw.random() for _ in range(5)]
        signals = DraftSignals(
            tokens=[0] * 5,
            confidence=[0.9 + 0.1 * q for q in quality] if has_head else None,
            certainty=[4.0 * q for q in quality],
        )
        right = [draw.random() < 0.4 + 0.5 * q for q in quality]
        n_correct = [*right, False].index(False)
        if i >= 2000:
            held_out += [(a, n_correct > k) for k, a in enumerate(model.survival(signals))]
        model.observe(signals, n_correct, 5)
    assert expected_calibration_error(held_out) < 0.02


def test_a_sequence_that_accepted_lately_is_promised_more_than_one_that_did_not() -> None:
    model = SurvivalModel(1)
    bad, unknown, good = (
        model.survival(DraftSignals([5], confidence=None, certainty=[1.0], recent=recent))[0]
        for recent in (0.1, None, 0.9)
    )
    assert bad < unknown == 0.5 < good
    assert good == pytest.approx(3 / 4)  # the odds of 0.9 are 9; the prior weighs them by 0.5


def test_each_sequence_is_judged_by_its_own_history() -> None:
    model, right, wrong = SurvivalModel(1), DraftLedger(), DraftLedger()
    for position in range(20):
        for ledger, token in ((right, 0), (wrong, 9)):
            signals = DraftSignals([0], None, [1.0], recent=ledger.recent)
            ledger.record(position, signals)
            for decided in ledger.resolve(position, [token]):
                model.observe(*decided)
    assert right.recent > 0.99
    assert wrong.recent < 0.01
    likely, unlikely = (
        model.survival(DraftSignals([0], None, [1.0], recent=ledger.recent))[0]
        for ledger in (right, wrong)
    )
    assert likely > 0.9
    assert unlikely < 0.1


def test_lookup_and_drafter_have_histories_of_their_own() -> None:
    ledger = DraftLedger()
    ledger.record(0, DraftSignals([1], None, [1.0]))
    ledger.record(0, DraftSignals([2], None, [], match_len=5))
    ledger.resolve(0, [2])
    assert ledger.recent == 0.375
    assert ledger.recent_lookup == 0.625


def test_a_long_copy_counts_once_among_the_last_copies() -> None:
    ledger = DraftLedger()
    for position, right in ((0, True), (16, False)):
        text = list(range(16)) if right else [-1]
        ledger.record(position, DraftSignals(list(range(16)), None, [], match_len=5))
        ledger.resolve(position, text)
    assert ledger.recent_lookup == pytest.approx((1 - 0.5 * 0.75**16) * 0.75)
    assert ledger.recent_copies == pytest.approx((0.5 + 0.08 * 0.5) * 0.92)


def test_a_copy_is_judged_by_many_before_it_and_where_they_are_not_told_by_the_last_tokens() -> (
    None
):
    model = SurvivalModel(1)
    weights = [float(name == "recent_copies") for name in FEATURES]
    model.set_slot(0, weights, prior_precision())
    looked = DraftSignals([7], None, [0.0], match_len=3, recent=0.2)
    (by_copies,) = model.survival(replace(looked, recent_copies=0.9))
    (by_tokens,) = model.survival(looked)
    assert by_copies == pytest.approx(0.9)
    assert by_tokens == pytest.approx(0.2)


def test_what_a_drafter_teaches_leaves_the_trust_in_lookup_alone() -> None:
    def lookup(model: SurvivalModel) -> float:
        return model.survival(DraftSignals([1], None, [], match_len=9, recent=0.5))[0]

    model = SurvivalModel(1)
    before = lookup(model)
    for _ in range(50):
        model.observe(DraftSignals([1], [0.9], [3.0], recent=0.5), 0, 1)
    assert lookup(model) == before


LOOKED = DraftSignals([7, 8, 9], None, [0.0, 0.0, 0.0], match_len=3, recent=0.5)


def test_two_proposers_are_compared_up_to_where_they_differ() -> None:
    model = SurvivalModel(3)
    compared = model.against(DraftSignals([7, 5, 9], [0.9] * 3, [1.0] * 3, recent=0.5), LOOKED)
    assert compared.rival is not None
    assert compared.rival.n_same == 1
    alone = model.survival(LOOKED)
    odds = [alone[0] / (1 - alone[0]), alone[1] / (alone[0] - alone[1])]
    assert compared.rival.logits == pytest.approx([math.log(each) for each in odds])
    same, other, rest = model.features(compared)
    first = FEATURES.index("same")
    z = compared.rival.logits
    assert same[first : first + 3] == (1.0, 0.0, z[0])
    assert other[first : first + 3] == (0.0, 1.0, -z[1])
    assert rest[first : first + 3] == (0.0, 0.0, 0.0)  # behind a difference nothing compares


def test_agreement_is_believed_and_contradiction_doubted_from_the_start() -> None:
    model = SurvivalModel(3)
    alone = DraftSignals([7], [0.6], [1.0], recent=0.5)
    strong = DraftSignals([7], None, [3.0], match_len=12, recent=0.9)
    for mine, theirs in ((alone, strong), (strong, alone)):
        other = DraftSignals([1], theirs.confidence, theirs.certainty, theirs.match_len, 0.5)
        agreed, doubted = model.against(mine, theirs), model.against(mine, other)
        chances = [model.survival(each)[0] for each in (doubted, mine, agreed)]
        assert chances == sorted(chances)
        assert (1 - chances[2]) < 0.2 * (1 - chances[0])


def test_without_a_rival_a_draft_stays_as_it_is() -> None:
    model, nothing = SurvivalModel(3), DraftSignals([], None, [])
    assert model.against(LOOKED, nothing) is LOOKED
    assert model.against(nothing, LOOKED) is nothing


def test_a_longer_rival_is_compared_as_far_as_the_shorter_one_goes() -> None:
    model = SurvivalModel(3)
    compared = model.against(DraftSignals([7, 8], None, [], recent=0.5), LOOKED)
    assert compared.rival is not None
    assert (compared.rival.n_same, len(compared.rival.logits)) == (2, 2)


def test_a_fit_that_knows_fewer_features_begins_like_a_prior_in_the_others() -> None:
    fitted = SurvivalModel(1)
    fitted.set_slot(0, [2.0] * len(FEATURES), [50.0] * len(FEATURES))
    saved = json.loads(json.dumps(fitted.to_json()))
    new = ("same", "other", "rival_lookup")
    kept = [i for i, name in enumerate(FEATURES) if name not in new]
    saved["features"] = [FEATURES[i] for i in kept]
    for name in ("weights", "precision"):
        saved[name] = [[row[i] for i in kept] for row in saved[name]]
    model = SurvivalModel.from_json(saved).to_json()
    for i, name in enumerate(FEATURES):
        known = (2.0, 50.0) if name not in new else (prior(0)[i], prior_precision()[i])
        assert (model["weights"][0][i], model["precision"][0][i]) == known  # type: ignore[index]


def test_one_wild_draft_moves_a_weight_by_half_at_most() -> None:
    model = SurvivalModel(1)
    model.observe(DraftSignals([1], [0.999999], [1e9], recent=0.99), 0, 1)
    moved = [
        abs(w - p)
        for w, p in zip(model.to_json()["weights"][0], prior(0), strict=True)  # type: ignore[index]
    ]
    assert 0.0 < max(moved) <= 0.5


def test_a_model_survives_json_and_goes_on_from_it() -> None:
    model = SurvivalModel(3)
    for n_correct in (0, 3, 1, 2, 3):
        model.observe(a_draft(3, confidence=0.8), n_correct, 3)
    again = SurvivalModel.from_json(json.loads(json.dumps(model.to_json())))
    assert again.to_json() == model.to_json()
    signals = DraftSignals([1, 2, 3], [0.5, 0.6, 0.7], [0.1, 2.0, 5.0], recent=0.4)
    assert again.survival(signals) == model.survival(signals)
    assert again.acceptance_by_position == [(0, 0)] * 3


def test_slots_beyond_a_fit_begin_like_its_last_one_but_learn_faster() -> None:
    fitted = SurvivalModel(2)
    fitted.set_slot(1, [1.0] * len(FEATURES), [100.0] * len(FEATURES))
    model = SurvivalModel.from_json(fitted.to_json(), n_slots=3)
    assert model.n_slots == 3
    weights, precision = model.to_json()["weights"], model.to_json()["precision"]
    assert weights[2] == weights[1] == [1.0] * len(FEATURES)  # type: ignore[index]
    assert precision[1:] == [[100.0] * len(FEATURES), prior_precision()]  # type: ignore[index]


def test_a_fit_is_lengthened_for_longer_drafts_and_itself_stays_as_it_is() -> None:
    fitted = SurvivalModel(2)
    before = fitted.to_json()
    longer = fitted.lengthened(5)
    assert longer.to_json() == SurvivalModel.from_json(before, n_slots=5).to_json()
    assert fitted.to_json() == before
    assert longer.lengthened(3) is longer


def test_what_an_offline_fit_knows_firmly_moves_little() -> None:
    loose, firm = SurvivalModel(1), SurvivalModel(1)
    firm.set_slot(0, prior(0), [100.0] * len(FEATURES))
    for model in (loose, firm):
        model.observe(a_draft(1), 0, 1)
    assert 0.5 > firm.survival(a_draft(1))[0] > 0.4
    assert loose.survival(a_draft(1))[0] < 0.4


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"features": ["bias"]},
        {"weights": None},
        {"weights": []},
        {"weights": [[0.0] * len(FEATURES)]},
        {"weights": [[0.0] * len(FEATURES), [0.0]]},
        {"weights": [[0.0] * len(FEATURES), ["1"] * len(FEATURES)]},
        {"weights": [[0.0] * len(FEATURES), [True] * len(FEATURES)]},
        {"weights": [[0.0] * len(FEATURES), [math.nan] * len(FEATURES)]},
        {"weights": [[0.0] * len(FEATURES), [math.inf] * len(FEATURES)]},
        {"weights": [[0.0] * len(FEATURES), [10**400] * len(FEATURES)]},
        {"weights": [[0.0] * len(FEATURES), 7]},
        {"precision": [[1.0] * len(FEATURES), [0.0] * len(FEATURES)]},
        {"precision": [[1.0] * len(FEATURES), [-1.0] * len(FEATURES)]},
        {"precision": {}},
    ],
)
def test_a_malformed_calibration_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="calibrate anew"):
        SurvivalModel.from_json(SurvivalModel(2).to_json() | change)


@pytest.mark.parametrize("data", [None, [], 1, "x", {}])
def test_what_is_no_calibration_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="calibrate anew"):
        SurvivalModel.from_json(data)


def test_a_draft_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="draft has 8 tokens but n_slots is 7"):
        SurvivalModel(7).survival(a_draft(8))


def test_signals_of_another_length_are_refused() -> None:
    signals = DraftSignals([1, 2], confidence=[0.5], certainty=[])
    with pytest.raises(ValueError, match="confidence has 1 values but the draft has 2 tokens"):
        SurvivalModel(2).survival(signals)


def test_counts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="n_correct 2 of n_seen 1 does not fit a draft of 3"):
        SurvivalModel(3).observe(a_draft(3), 2, 1)


def test_a_model_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="n_slots 0 is below 1"):
        SurvivalModel(0)


def tokens_of(decided: Decided) -> list[tuple[list[int], int, int]]:
    return [(signals.tokens, n_correct, n_seen) for signals, n_correct, n_seen in decided]


def drafted(*tokens: int) -> DraftSignals:
    return DraftSignals(list(tokens), confidence=None, certainty=[])


def test_a_draft_stays_open_until_the_text_reaches_its_end() -> None:
    ledger = DraftLedger()
    ledger.record(10, drafted(1, 2, 3))
    assert ledger.resolve(10, [1]) == []
    assert ledger.resolve(11, [2]) == []
    assert tokens_of(ledger.resolve(12, [3])) == [([1, 2, 3], 3, 3)]
    assert ledger.flush() == []


def test_the_first_difference_decides_a_draft() -> None:
    ledger = DraftLedger()
    ledger.record(10, drafted(1, 2, 3))
    assert tokens_of(ledger.resolve(10, [1, 9, 3])) == [([1, 2, 3], 1, 2)]


def test_a_draft_that_was_never_verified_is_decided_by_the_text() -> None:
    ledger = DraftLedger()
    ledger.record(0, drafted(5, 6))
    assert tokens_of(ledger.resolve(0, [7])) == [([5, 6], 0, 1)]


def test_overlapping_drafts_are_resolved_side_by_side() -> None:
    ledger = DraftLedger()
    ledger.record(0, drafted(1, 2, 3))
    assert ledger.resolve(0, [1]) == []
    ledger.record(1, drafted(2, 8, 9))
    assert tokens_of(ledger.resolve(1, [2, 3])) == [([1, 2, 3], 3, 3), ([2, 8, 9], 1, 2)]


def test_the_end_of_the_text_gives_what_was_seen() -> None:
    ledger = DraftLedger()
    ledger.record(0, drafted(1, 2, 3))
    ledger.resolve(0, [1, 2])
    ledger.record(2, drafted(3, 4))
    assert tokens_of(ledger.flush()) == [([1, 2, 3], 2, 2)]
    assert ledger.flush() == []


def test_a_gap_in_the_text_ends_a_draft_with_what_was_seen() -> None:
    ledger = DraftLedger()
    ledger.record(0, drafted(1, 2, 3))
    ledger.resolve(0, [1])
    assert tokens_of(ledger.resolve(2, [3])) == [([1, 2, 3], 1, 1)]


def test_an_empty_draft_is_not_recorded() -> None:
    ledger = DraftLedger()
    ledger.record(0, drafted())
    assert ledger.resolve(0, [1]) == []


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(0, 6),
    st.lists(st.integers(1, 4), max_size=12),
)
def test_resolution_does_not_depend_on_how_the_text_arrives(
    text: list[int], draft: list[int], start: int, steps: list[int]
) -> None:
    ledger = DraftLedger()
    ledger.record(start, drafted(*draft))
    position, decided = 0, []
    for step in [*steps, len(text)]:
        decided += ledger.resolve(position, text[position : position + step])
        position = min(position + step, len(text))
    decided += ledger.flush()

    reached = text[start : start + len(draft)]
    differing = [k for k, (d, t) in enumerate(zip(draft, reached, strict=False)) if d != t]
    n_correct = differing[0] if differing else len(reached)
    n_seen = n_correct + bool(differing)
    assert tokens_of(decided) == ([(draft, n_correct, n_seen)] if n_seen else [])


def out_of_the_cache(odds: float, count: int, *, is_cached: bool = True) -> DraftSignals:
    return DraftSignals(
        [7],
        None,
        [0.0],
        match_len=4,
        recent=0.5,
        is_cached=is_cached,
        cache_agreement=[odds],
        cache_count=[count],
    )


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_the_cache_says_counts_the_more_the_more_often_it_saw_it(is_cached: bool) -> None:
    model = SurvivalModel(1)
    rare, once, often = (
        model.survival(out_of_the_cache(odds, n, is_cached=is_cached))[0]
        for odds, n in ((-2.0, 30), (1.0, 1), (3.4, 30))
    )
    assert rare < once < often
    if is_cached:  # a copy has other witnesses
        assert rare < 0.1
        assert often > 0.8


def test_tokens_out_of_the_cache_and_copies_are_learnt_apart() -> None:
    model = SurvivalModel(1)
    copied, cached = (out_of_the_cache(1.0, 3, is_cached=each) for each in (False, True))
    before = model.survival(copied)
    for _ in range(50):
        model.observe(cached, 0, 1)
    assert model.survival(copied) == before
    assert model.survival(cached)[0] < 0.2
    assert model.lookup_acceptance_by_position == [(0, 50)]
    assert model.acceptance_by_position == [(0, 0)]


@pytest.mark.parametrize("name", ["cache_agreement", "cache_count"])
def test_evidence_of_another_length_is_refused(name: str) -> None:
    broken = replace(out_of_the_cache(1.0, 1), **{name: [1, 1]})
    with pytest.raises(ValueError, match=f"{name} has 2 values but the draft has 1 tokens"):
        SurvivalModel(1).survival(broken)
