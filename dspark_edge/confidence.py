"""From a draft's signals to survival: what each of its tokens has to be believed.

Owns: the calibration of confidence per position, and how it learns.
Refuses to know: the scheduler, the cost of anything, and where tokens come from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

# One weight per feature. A drafter's tokens and those of lookup share none, so that one model can
# serve both.
FEATURES = (
    "drafter",  # 1 for a drafter's token
    "confidence",  # logit of c_k
    "log_margin",  # certainty, where small differences count ...
    "margin",  # ... and where large ones do
    "recent",  # logit of this sequence's recent acceptance
    "lookup",  # 1 for a token of lookup
    "match_len",
    "agreement",  # certainty of lookup
    "recent_lookup",  # logit of this sequence's recent acceptance of lookup
)
Features = tuple[float, float, float, float, float, float, float, float, float]
# 0.7: heads are over-confident. The certainty of a draw says more than a head.
DRAFTER_PRIOR = (0.0, 0.7, 0.5, 0.8, 0.5)
# Bias by slot, then one weight each: fit on the replies of SmolLM2 to our calibration prompts, at
# temperatures 0, 0.7 and 1. What a match is worth depends on the text more than on the model.
LOOKUP_BIASES = (-2.3, -1.8, -1.6, -1.4)
LOOKUP_PRIOR = (3.4, 0.9, 0.1)
PRIOR_PRECISION = 1.0
LOOKUP_PRECISION = 20.0  # of its prior, which is a fit

CONFIDENCE_EDGE = 1e-3  # a head that says 0 or 1 is read as this far from it
MARGIN_MIDDLE = 1.0  # logits; speaks neither for nor against
LOG_MARGIN_MIDDLE = math.log1p(MARGIN_MIDDLE)
MARGIN_MAX = 20.0
MARGIN_UNIT = 2.0
MATCH_LEN_MAX = 16
MATCH_UNIT = math.log1p(MATCH_LEN_MAX)
AGREEMENT_MAX = 4.0  # about 27 times one way, never another
RECENT_START = 0.5
RECENT_EDGE = 0.02
RECENT_SMOOTHING = 0.25  # per slot; about the last draft
FORGETTING = 0.995  # of past precision, so that learning never comes to rest
STEP_MAX = 0.5  # of one weight in one step: curvature vanishes where the model is sure and wrong
LOGIT_MAX = 12.0  # keeps every probability inside (0, 1)
FORMAT_VERSION = 2


@dataclass(slots=True)
class DraftSignals:
    """What a drafter said about one draft; lists run over its tokens.

    confidence: c_k in 0..1 from the drafter's head, None without one.
    certainty: score margin of the drawn token over the runner-up, in logits at the drafting
    temperature, at least 0; for lookup its agreement (LookupProposal); empty when there is none.
    match_len: length in tokens of the match that a lookup draft follows; 0 for a drafter's.
    recent: this sequence's recent acceptance when the draft was made (DraftLedger.recent); None
    where the caller keeps no history per sequence: then that of all sequences counts.
    """

    tokens: list[int]
    confidence: list[float] | None
    certainty: list[float]
    match_len: int = 0
    recent: float | None = None


class SurvivalModel:
    """Per-position logistic calibration of a draft's signals, offline fit and online learning.

    Before any data a head's confidence is believed with scepticism, and a drafter without a head
    is right about half the time per slot. Each resolved slot moves its weights by one Newton step
    with a diagonal, slowly forgotten precision: what an offline fit knows well moves little.
    """

    __slots__ = ("_counts", "_lookup_counts", "_precision", "_recent", "_weights")

    def __init__(self, n_slots: int) -> None:
        """n_slots: longest draft in tokens. Raises ValueError when below 1."""
        if n_slots < 1:
            raise ValueError(f"n_slots {n_slots} is below 1; pass the drafter's block_size")
        self._weights = [prior(slot) for slot in range(n_slots)]
        self._precision = [prior_precision() for _ in range(n_slots)]
        self._counts = [(0, 0)] * n_slots
        self._lookup_counts = [(0, 0)] * n_slots
        self._recent = RECENT_START

    @property
    def n_slots(self) -> int:
        """Longest draft, in tokens."""
        return len(self._weights)

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) of each slot of the drafter, given that those before were right."""
        return list(self._counts)

    @property
    def lookup_acceptance_by_position(self) -> list[tuple[int, int]]:
        """The same for lookup."""
        return list(self._lookup_counts)

    def survival(self, signals: DraftSignals) -> list[float]:
        """a_k for each draft token: non-increasing, strictly between 0 and 1.

        Raises ValueError when the draft is longer than n_slots or its lists differ in length.
        """
        survival: list[float] = []
        a = 1.0
        for weights, x in zip(self._weights, self.features(signals), strict=False):
            a *= _probability(weights, x)
            survival.append(a)
        return survival

    def observe(self, signals: DraftSignals, n_correct: int, n_seen: int) -> None:
        """Learn from one resolved draft.

        Slots 1..n_correct were right and, if n_correct < n_seen, the next was wrong. Slots beyond
        the first wrong one or beyond n_seen are censored: they say nothing.
        Raises ValueError unless 0 <= n_correct <= n_seen <= number of draft tokens.
        """
        n_tokens = len(signals.tokens)
        if not 0 <= n_correct <= n_seen <= n_tokens:
            raise ValueError(
                f"n_correct {n_correct} of n_seen {n_seen} does not fit a draft of {n_tokens}"
            )
        features = self.features(signals)
        for slot in range(n_decided(n_correct, n_seen)):
            right = slot < n_correct
            self._learn(slot, features[slot], right)
            counts = self._lookup_counts if signals.match_len > 0 else self._counts
            n_right, n_observed = counts[slot]
            counts[slot] = (n_right + right, n_observed + 1)
            self._recent += RECENT_SMOOTHING * (right - self._recent)

    def features(self, signals: DraftSignals) -> list[Features]:
        """What the weights are applied to, for each draft token. Raises ValueError as survival."""
        n_tokens = len(signals.tokens)
        if n_tokens > len(self._weights):
            raise ValueError(f"draft has {n_tokens} tokens but n_slots is {len(self._weights)}")
        confidence = _one_per_token(signals.confidence, n_tokens, "confidence")
        certainty = _one_per_token(signals.certainty or None, n_tokens, "certainty")
        recent = _logit(self._recent if signals.recent is None else signals.recent, RECENT_EDGE)
        if signals.match_len > 0:
            match = math.log1p(min(signals.match_len, MATCH_LEN_MAX)) / MATCH_UNIT
            return [
                (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, match, _agreement_feature(odds), recent)
                for odds in certainty
            ]
        return [
            (1.0, _confidence_feature(c), *_certainty_features(m), recent, 0.0, 0.0, 0.0, 0.0)
            for c, m in zip(confidence, certainty, strict=True)
        ]

    def set_slot(self, slot: int, weights: Sequence[float], precision: Sequence[float]) -> None:
        """Give one slot the weights of an offline fit and how firmly each is known.

        Raises ValueError unless both have one finite number per feature, precision above 0.
        """
        self._weights[slot] = _checked_row(weights, "weights", -math.inf)
        self._precision[slot] = _checked_row(precision, "precision", 0.0)

    def to_json(self) -> dict[str, object]:
        """A plain dict that json can write: weights and precision, not the history."""
        return {
            "version": FORMAT_VERSION,
            "features": list(FEATURES),
            "weights": [list(row) for row in self._weights],
            "precision": [list(row) for row in self._precision],
        }

    @classmethod
    def from_json(cls, data: object, *, n_slots: int | None = None) -> SurvivalModel:
        """The model that to_json() wrote, as the start of online learning.

        n_slots: longest draft where that is not the fit's; slots beyond the fit begin like its last
        one, but loosely. Raises ValueError when malformed, of another version or other features.
        """
        if not isinstance(data, Mapping) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"calibration is not of version {FORMAT_VERSION}; calibrate anew")
        if data.get("features") != list(FEATURES):
            raise ValueError("calibration has other features than this version; calibrate anew")
        weights, precision = data.get("weights"), data.get("precision")
        if not isinstance(weights, list) or not isinstance(precision, list):
            raise ValueError("calibration has no weights and precision; calibrate anew")
        if not 0 < len(weights) == len(precision):
            raise ValueError(
                f"calibration has weights of {len(weights)} slots and precision of "
                f"{len(precision)}; calibrate anew"
            )
        model = cls(len(weights) if n_slots is None else n_slots)
        for slot in range(model.n_slots):
            if slot < len(weights):
                model.set_slot(slot, weights[slot], precision[slot])
            else:
                model.set_slot(slot, weights[-1], prior_precision())
        return model

    def lengthened(self, n_slots: int) -> SurvivalModel:
        """A model for drafts of n_slots tokens, this one if it has them: as from_json makes it."""
        if n_slots <= self.n_slots:
            return self
        return SurvivalModel.from_json(self.to_json(), n_slots=n_slots)

    def _learn(self, slot: int, x: Features, right: bool) -> None:
        weights, precision = self._weights[slot], self._precision[slot]
        p = _probability(weights, x)
        error, curvature = p - right, p * (1.0 - p)
        for i, value in enumerate(x):
            if value != 0.0:  # what was not seen is not forgotten either
                kept = max(FORGETTING * precision[i], PRIOR_PRECISION)
                precision[i] = kept + curvature * value * value
                step = error * value / precision[i]
                weights[i] -= min(max(step, -STEP_MAX), STEP_MAX)


def prior(slot: int) -> list[float]:
    """The weights of a slot (from 0) before any data, one per feature."""
    bias = LOOKUP_BIASES[min(slot, len(LOOKUP_BIASES) - 1)]
    return [*DRAFTER_PRIOR, bias, *LOOKUP_PRIOR]


def prior_precision() -> list[float]:
    """How firmly the weights of a prior are known, one precision per feature."""
    n_lookup = 1 + len(LOOKUP_PRIOR)
    return [PRIOR_PRECISION] * len(DRAFTER_PRIOR) + [LOOKUP_PRECISION] * n_lookup


def n_decided(n_correct: int, n_seen: int) -> int:
    """Slots of a draft about which the text has spoken: the right ones and the first wrong one."""
    return min(n_correct + (n_correct < n_seen), n_seen)


def _one_per_token(values: list[float] | None, n_tokens: int, name: str) -> list[float]:
    """The values, or NaN for each token where there are none."""
    if values is None:
        return [math.nan] * n_tokens
    if len(values) != n_tokens:
        raise ValueError(f"{name} has {len(values)} values but the draft has {n_tokens} tokens")
    return values


def _confidence_feature(c: float) -> float:
    return 0.0 if math.isnan(c) else _logit(c, CONFIDENCE_EDGE)


def _certainty_features(margin: float) -> tuple[float, float]:
    if math.isnan(margin):
        return 0.0, 0.0
    margin = min(max(margin, 0.0), MARGIN_MAX)
    return math.log1p(margin) - LOG_MARGIN_MIDDLE, (margin - MARGIN_MIDDLE) / MARGIN_UNIT


def _agreement_feature(odds: float) -> float:
    return 0.0 if math.isnan(odds) else min(max(odds, -AGREEMENT_MAX), AGREEMENT_MAX)


def _logit(p: float, edge: float) -> float:
    p = min(max(p, edge), 1.0 - edge)
    return math.log(p / (1.0 - p))


def _probability(weights: Sequence[float], x: Features) -> float:
    logit = sum(map(mul, weights, x))
    return 1.0 / (1.0 + math.exp(-min(max(logit, -LOGIT_MAX), LOGIT_MAX)))


def _checked_row(row: object, name: str, above: float) -> list[float]:
    """One finite number per feature, each above a limit."""
    if not isinstance(row, Sequence) or len(row) != len(FEATURES):
        raise ValueError(f"calibration's {name} need {len(FEATURES)} numbers; calibrate anew")
    for value in row:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (above < value and abs(value) <= sys.float_info.max):
            raise ValueError(f"calibration's {name} have {value!r}; calibrate anew")
    return [float(value) for value in row]
