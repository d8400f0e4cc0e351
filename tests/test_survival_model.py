"""The core's survival model against a plain definition, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_edge._core import Comparison, SurvivalNumbers
from dspark_edge.confidence import SurvivalModel
from dspark_edge.signals import FEATURES, KINDS, DraftSignals, n_same_tokens

N_SLOTS = 18
EXACT = 1e-12

# ---------------------------------------------------------------- the definition


def clamped(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def logit(p: float, edge: float) -> float:
    p = clamped(p, edge, 1.0 - edge)
    return math.log(p / (1.0 - p))


def rival_features(rival: Comparison | None, k: int) -> list[float]:
    if rival is None or k >= len(rival.logits):
        return [0.0, 0.0, 0.0]
    z = rival.logits[k]
    return [1.0, 0.0, z] if k < rival.n_same else [0.0, 1.0, -z]


def features(signals: DraftSignals, recent: float) -> list[list[float]]:
    last = logit(recent if signals.recent is None else signals.recent, 0.02)
    copies = last if signals.recent_copies is None else logit(signals.recent_copies, 0.02)
    rows = []
    for k in range(len(signals.tokens)):
        certainty = signals.certainty[k] if signals.certainty else math.nan
        rival = rival_features(signals.rival, k)
        if signals.match_len > 0:
            match = math.log1p(min(signals.match_len, 16)) / math.log1p(16)
            agreement = 0.0 if math.isnan(certainty) else clamped(certainty, -4.0, 4.0)
            cache = [0.0, 0.0]
            if signals.cache_count:
                cache = [signals.cache_agreement[k], math.log1p(signals.cache_count[k]) / 5.0]
            rows.append([1.0, match, agreement, last, copies, *rival, *cache])
            continue
        c = math.nan if signals.confidence is None else signals.confidence[k]
        margin = clamped(certainty, 0.0, 20.0)
        margins = [math.log1p(margin) - math.log(2.0), (margin - 1.0) / 2.0]
        rows.append(
            [
                1.0,
                0.0 if math.isnan(c) else logit(c, 1e-3),
                *([0.0, 0.0] if math.isnan(certainty) else margins),
                last,
                *rival,
            ]
        )
    return rows


def dot(weights: Sequence[float], x: Sequence[float]) -> float:
    return sum(w * value for w, value in zip(weights, x, strict=True))


def probability(weights: Sequence[float], x: Sequence[float]) -> float:
    return 1.0 / (1.0 + math.exp(-clamped(dot(weights, x), -12.0, 12.0)))


@dataclass
class Plain:
    """The survival model, written to be read. Rows are [slot][features of all kinds]."""

    weights: list[list[float]]
    precision: list[list[float]]
    recent: float = 0.5
    counts: tuple[list[tuple[int, int]], ...] = field(
        default_factory=lambda: ([(0, 0)] * N_SLOTS, [(0, 0)] * N_SLOTS)
    )

    def survival(self, signals: DraftSignals, floor: float) -> list[float]:
        place = KINDS[signals.kind]
        survival = []
        a = 1.0
        for weights, x in zip(self.weights, features(signals, self.recent), strict=False):
            a *= probability(weights[place], x)
            survival.append(a)
            if a < floor:
                break
        return survival

    def against(self, signals: DraftSignals, rival: DraftSignals) -> Comparison:
        n_same = n_same_tokens(signals.tokens, rival.tokens)
        n = min(n_same + 1, len(signals.tokens), len(rival.tokens))
        rows = features(replace(rival, rival=None), self.recent)[:n]
        place = KINDS[rival.kind]
        logits = [dot(w[place], x) for w, x in zip(self.weights, rows, strict=False)]
        return Comparison(n_same, [clamped(z, -4.0, 4.0) for z in logits])

    def observe(self, signals: DraftSignals, n_correct: int, n_seen: int) -> None:
        rows = features(signals, self.recent)
        first = KINDS[signals.kind].start
        counts = self.counts[signals.match_len > 0]
        for slot in range(min(n_correct + (n_correct < n_seen), n_seen)):
            right = slot < n_correct
            p = probability(self.weights[slot][KINDS[signals.kind]], rows[slot])
            for i, value in enumerate(rows[slot], start=first):
                if value != 0.0:
                    kept = max(0.995 * self.precision[slot][i], 1.0)
                    precision = kept + p * (1.0 - p) * value * value
                    step = (p - right) * value / precision
                    self.precision[slot][i] = precision
                    self.weights[slot][i] -= clamped(step, -0.5, 0.5)
            n_right, n_observed = counts[slot]
            counts[slot] = (n_right + right, n_observed + 1)
            self.recent += 0.25 * (right - self.recent)


# ---------------------------------------------------------------- drafts of all kinds


def maybe_nan(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high) | st.just(math.nan)


@st.composite
def drafts(draw: st.DrawFn) -> DraftSignals:
    n = draw(st.integers(0, N_SLOTS))

    def lists(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
        return st.lists(values, min_size=n, max_size=n)

    chance = st.none() | st.floats(0, 1)
    is_lookup, has_cache = draw(st.booleans()), draw(st.booleans())
    return DraftSignals(
        tokens=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        confidence=draw(st.none() | lists(maybe_nan(0, 1))),
        certainty=draw(st.just([]) | lists(maybe_nan(-9, math.inf))),
        match_len=draw(st.integers(1, 40)) if is_lookup else 0,
        recent=draw(chance),
        recent_copies=draw(chance),
        is_cached=draw(st.booleans()),
        cache_agreement=draw(lists(st.floats(-4, 4))) if has_cache else [],
        cache_count=draw(st.lists(st.integers(0, 128), min_size=n, max_size=n))
        if has_cache
        else [],
    )


NUMBERS = st.integers(0, 2**32).map(lambda seed: [math.sin(seed + i) for i in range(500)])


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(st.tuples(drafts(), drafts(), st.integers(0, N_SLOTS), st.booleans()), max_size=6),
    st.sampled_from([0.0, 0.02, 0.5, 2.0]),
    st.floats(0.1, 20),
    NUMBERS,
)
def test_the_core_says_and_learns_what_the_definition_does(
    rounds: list[tuple[DraftSignals, DraftSignals, int, bool]],
    floor: float,
    scale: float,
    numbers: list[float],
) -> None:
    n = len(FEATURES)
    weights = [[scale * x for x in numbers[3 * s : 3 * s + n]] for s in range(N_SLOTS)]
    precision = [[30 + 29 * x for x in numbers[5 * s : 5 * s + n]] for s in range(N_SLOTS)]
    model = SurvivalModel(N_SLOTS)
    for slot in range(N_SLOTS):
        model.set_slot(slot, weights[slot], precision[slot])
    plain = Plain(weights, precision)
    for one, other, n_correct, is_cut in rounds:
        compared = model.against(one, other)
        if one.tokens and other.tokens:
            expected = plain.against(one, other)
            assert compared == replace(one, rival=compared.rival)
            assert compared.rival is not None
            assert compared.rival.n_same == expected.n_same
            assert compared.rival.logits == pytest.approx(expected.logits, rel=EXACT, abs=EXACT)
            # A rival that was compared itself is judged as if alone.
            assert model.against(one, model.against(other, one)) == compared
        else:
            assert compared is one
        for signals in (one, compared):
            rows = features(signals, plain.recent)
            assert list(map(list, model.features(signals))) == [
                pytest.approx(row, rel=EXACT, abs=EXACT) for row in rows
            ]
            assert model.survival(signals, floor) == pytest.approx(
                plain.survival(signals, floor), rel=EXACT
            )
        n_right = min(n_correct, len(one.tokens))
        n_seen = n_right if is_cut else len(one.tokens)
        for learner in (model, plain):
            learner.observe(compared, n_right, n_seen)
    for learnt, expected_rows in (
        (model.weights, plain.weights),
        (model.precision, plain.precision),
    ):
        for learnt_row, row in zip(learnt, expected_rows, strict=True):
            assert learnt_row == pytest.approx(row, rel=1e-9, abs=1e-9)  # errors add up
    assert model.acceptance_by_position == plain.counts[0]
    assert model.lookup_acceptance_by_position == plain.counts[1]


# ---------------------------------------------------------------- the border


def test_a_comparison_leaves_the_draft_that_it_is_made_for_as_it_is() -> None:
    model = SurvivalModel(2)
    mine, theirs = DraftSignals([1], [0.5], [1.0]), DraftSignals([1], None, [], match_len=3)
    compared = model.against(mine, theirs)
    assert mine.rival is None
    assert compared.tokens is mine.tokens
    compared.recent = 0.9
    assert mine.recent is None


@pytest.mark.parametrize("nonsense", [None, 7, [1, 2], object(), DraftSignals])
def test_what_is_no_draft_is_refused(nonsense: object) -> None:
    model = SurvivalModel(1)
    for call in (model.survival, model.features):
        with pytest.raises((AttributeError, TypeError), match=r"no attribute|member_descriptor"):
            call(nonsense)  # type: ignore[operator]
    good = DraftSignals([1], None, [])
    assert model.survival(good) == [0.5]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": (1,)}, "tokens is a tuple"),
        ({"confidence": 0.5}, "confidence is a float"),
        ({"certainty": None}, "certainty is a NoneType"),
        ({"rival": [0, []]}, "rival is a list"),
        ({"rival": (0, None)}, "rival is a tuple"),
        ({"certainty": ["1"]}, "must be real number, not str"),
        ({"recent": "1"}, "must be real number, not str"),
        ({"match_len": 1.5}, "float"),
    ],
)
def test_fields_of_another_type_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(TypeError, match=what):
        SurvivalModel(1).survival(replace(DraftSignals([1], None, [1.0]), **change))  # type: ignore[arg-type]


def test_a_draft_that_lacks_a_field_is_refused() -> None:
    signals = DraftSignals([1], None, [1.0])
    del signals.recent
    with pytest.raises(AttributeError, match="recent"):
        SurvivalModel(1).survival(signals)


def numbers(n_slots: int, n_features: int, n_precision: int) -> SurvivalNumbers:
    return SurvivalNumbers(
        [[0.0] * n_features] * n_slots,
        [[1.0] * n_features] * n_precision,
        precision_min=1.0,
        recent_start=0.5,
        recent_smoothing=0.25,
    )


def test_rows_that_do_not_fit_are_refused() -> None:
    n = len(FEATURES)
    with pytest.raises(ValueError, match="weights have 2 slots but precision has 1"):
        numbers(2, n, 1)
    with pytest.raises(ValueError, match="a row has 27 numbers; give one for each of 28 features"):
        numbers(1, n - 1, 1)
    with pytest.raises(ValueError, match="slot 2 is not below n_slots 2"):
        numbers(2, n, 2).set_row(2, [0.0] * n, [1.0] * n)
