"""From a draft's signals to survival: what each of its tokens has to be believed.

Owns: the calibration of confidence per position, and how it learns.
Refuses to know: the scheduler, the cost of anything, and where tokens come from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import mul

from .signals import (
    DRAFTED,
    FEATURES,
    KINDS,
    RIVAL_MAX,
    Comparison,
    DraftSignals,
    Features,
    features_of,
    n_same_tokens,
)

# 0.7: heads are over-confident. The certainty of a draw says more than a head. What lookup says of
# the same place (the last three): as in a fit to SmolLM2's replies to our calibration prompts.
DRAFTER_PRIOR = (0.0, 0.7, 0.5, 0.8, 0.5, 1.2, -0.8, 0.7)
# Bias by slot, then one weight each: from fits to the same replies, at temperatures 0, 0.7 and 1.
# What a match is worth depends on the text more than on the model.
LOOKUP_BIASES = (-2.3, -1.8, -1.6, -1.4)
LOOKUP_PRIOR = (3.4, 0.9, 0.1, 0.3, 1.0, -0.8, 0.4, 0.5, 0.2)
CACHED_BIASES = (-2.0, -2.0, -1.9, -1.8)
CACHED_PRIOR = (0.5, 0.7, 0.1, 0.5, 1.0, -0.8, 0.4, 0.9, 1.0)
PRIOR_PRECISION = 1.0
LOOKUP_PRECISION = 20.0  # of their priors, which are fits

RECENT_START = 0.5
RECENT_SMOOTHING = 0.25  # per slot; about the last draft
COPY_SMOOTHING = 0.08  # per copy of lookup; about the last dozen
FORGETTING = 0.995  # of past precision, so that learning never comes to rest
STEP_MAX = 0.5  # of one weight in one step: curvature vanishes where the model is sure and wrong
LOGIT_MAX = 12.0  # keeps every probability inside (0, 1)
SURVIVAL_FLOOR = 0.02  # below it no token has ever been worth its place in a pass
FORMAT_VERSION = 2


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
        self._weights = _split([prior(slot) for slot in range(n_slots)])
        self._precision = _split([prior_precision() for _ in range(n_slots)])
        self._counts = [(0, 0)] * n_slots
        self._lookup_counts = [(0, 0)] * n_slots
        self._recent = RECENT_START

    @property
    def n_slots(self) -> int:
        """Longest draft, in tokens."""
        return len(self._counts)

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) of each slot of the drafter, given that those before were right."""
        return list(self._counts)

    @property
    def lookup_acceptance_by_position(self) -> list[tuple[int, int]]:
        """The same for lookup."""
        return list(self._lookup_counts)

    def survival(self, signals: DraftSignals, floor: float = 0.0) -> list[float]:
        """a_k for each draft token: non-increasing, strictly between 0 and 1.

        It ends behind the first below `floor`: nobody needs to know how unlikely the rest is.
        Raises ValueError when the draft is longer than n_slots or its lists differ in length.
        """
        survival: list[float] = []
        a = 1.0
        weights = self._weights[signals.kind]
        for own, x in zip(weights, self.features(signals), strict=False):
            a *= _probability(own, x)
            survival.append(a)
            if a < floor:
                break
        return survival

    def against(self, signals: DraftSignals, rival: DraftSignals) -> DraftSignals:
        """The draft, compared with the other proposer's for the same place, if both have one.

        Two that agree are right more often than either alone. Raises ValueError as survival.
        """
        if not signals.tokens or not rival.tokens:
            return signals
        n_same = n_same_tokens(signals.tokens, rival.tokens)
        n = min(n_same + 1, len(signals.tokens), len(rival.tokens))
        weights = self._weights[rival.kind][:n]
        alone = self.features(replace(rival, rival=None))
        logits = [
            min(max(_logit(own, x), -RIVAL_MAX), RIVAL_MAX)
            for own, x in zip(weights, alone, strict=False)
        ]
        return replace(signals, rival=Comparison(n_same, logits))

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
        kind = signals.kind
        counts = self._counts if kind == DRAFTED else self._lookup_counts
        decided = range(n_decided(n_correct, n_seen))
        for slot, x in zip(decided, self.features(signals), strict=False):
            right = slot < n_correct
            _learn(self._weights[kind][slot], self._precision[kind][slot], x, right)
            n_right, n_observed = counts[slot]
            counts[slot] = (n_right + right, n_observed + 1)
            self._recent += RECENT_SMOOTHING * (right - self._recent)

    def features(self, signals: DraftSignals) -> Iterator[Features]:
        """What the weights are applied to, for each draft token. Raises ValueError as survival."""
        n_tokens = len(signals.tokens)
        if n_tokens > self.n_slots:
            raise ValueError(f"draft has {n_tokens} tokens but n_slots is {self.n_slots}")
        return features_of(signals, self._recent)

    def set_slot(self, slot: int, weights: Sequence[float], precision: Sequence[float]) -> None:
        """Give one slot the weights of an offline fit and how firmly each is known.

        Raises ValueError unless both have one finite number per feature, precision above 0.
        """
        rows = (
            _checked_row(weights, "weights", -math.inf),
            _checked_row(precision, "precision", 0.0),
        )
        for each, row in zip((self._weights, self._precision), rows, strict=True):
            for own, place in zip(each, KINDS, strict=True):
                own[slot] = row[place]

    def to_json(self) -> dict[str, object]:
        """A plain dict that json can write: weights and precision, not the history."""
        return {
            "version": FORMAT_VERSION,
            "features": list(FEATURES),
            "weights": [list(chain(*slot)) for slot in zip(*self._weights, strict=True)],
            "precision": [list(chain(*slot)) for slot in zip(*self._precision, strict=True)],
        }

    @classmethod
    def from_json(cls, data: object, *, n_slots: int | None = None) -> SurvivalModel:
        """The model that to_json() wrote, as the start of online learning.

        n_slots: longest draft where that is not the fit's; slots beyond the fit begin like its last
        one, but loosely. Raises ValueError when malformed, of another version or other features.
        """
        if not isinstance(data, Mapping) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"calibration is not of version {FORMAT_VERSION}; calibrate anew")
        names = data.get("features")
        if not isinstance(names, list) or not all(name in FEATURES for name in names):
            raise ValueError("calibration has features that are unknown here; calibrate anew")
        weights, precision = data.get("weights"), data.get("precision")
        if not isinstance(weights, list) or not isinstance(precision, list):
            raise ValueError("calibration has no weights and precision; calibrate anew")
        if not 0 < len(weights) == len(precision):
            raise ValueError(
                f"calibration has weights of {len(weights)} slots and precision of "
                f"{len(precision)}; calibrate anew"
            )
        model = cls(len(weights) if n_slots is None else n_slots)
        known: list[float] = []
        for slot in range(model.n_slots):
            trust = prior_precision()
            if slot < len(weights):
                known = _named(names, weights[slot], prior(slot), "weights")
                trust = _named(names, precision[slot], trust, "precision")
            model.set_slot(slot, known, trust)
        return model

    def lengthened(self, n_slots: int) -> SurvivalModel:
        """A model for drafts of n_slots tokens, this one if it has them: as from_json makes it."""
        if n_slots <= self.n_slots:
            return self
        return SurvivalModel.from_json(self.to_json(), n_slots=n_slots)


def _learn(weights: list[float], precision: list[float], x: Features, right: bool) -> None:
    p = _probability(weights, x)
    error, curvature = p - right, p * (1.0 - p)
    for i, value in enumerate(x):
        if value != 0.0:  # what was not seen is not forgotten either
            kept = max(FORGETTING * precision[i], PRIOR_PRECISION)
            precision[i] = kept + curvature * value * value
            step = error * value / precision[i]
            weights[i] -= min(max(step, -STEP_MAX), STEP_MAX)


def _split(rows: list[list[float]]) -> list[list[list[float]]]:
    """For each kind of tokens, of each slot what belongs to it."""
    return [[row[place] for row in rows] for place in KINDS]


def prior(slot: int) -> list[float]:
    """The weights of a slot (from 0) before any data, one per feature."""
    last = len(LOOKUP_BIASES) - 1
    copied, cached = (biases[min(slot, last)] for biases in (LOOKUP_BIASES, CACHED_BIASES))
    return [*DRAFTER_PRIOR, copied, *LOOKUP_PRIOR, cached, *CACHED_PRIOR]


def prior_precision() -> list[float]:
    """How firmly the weights of a prior are known, one precision per feature."""
    n_drafter = len(DRAFTER_PRIOR)
    return [PRIOR_PRECISION] * n_drafter + [LOOKUP_PRECISION] * (len(FEATURES) - n_drafter)


def n_decided(n_correct: int, n_seen: int) -> int:
    """Slots of a draft about which the text has spoken: the right ones and the first wrong one."""
    return min(n_correct + (n_correct < n_seen), n_seen)


def _probability(weights: Sequence[float], x: Features) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(_logit(weights, x), -LOGIT_MAX), LOGIT_MAX)))


def _logit(weights: Sequence[float], x: Features) -> float:
    return float(sum(map(mul, weights, x)))


def _named(names: Sequence[str], row: object, start: Sequence[float], what: str) -> list[float]:
    """A saved row in our order of features; those that it lacks begin like a prior."""
    if not isinstance(row, list) or len(row) != len(names):
        raise ValueError(f"calibration's {what} need {len(names)} numbers; calibrate anew")
    saved = dict(zip(names, row, strict=True))
    return [saved.get(name, value) for name, value in zip(FEATURES, start, strict=True)]


def _checked_row(row: object, name: str, above: float) -> list[float]:
    """One finite number per feature, each above a limit."""
    if not isinstance(row, Sequence) or len(row) != len(FEATURES):
        raise ValueError(f"calibration's {name} need {len(FEATURES)} numbers; calibrate anew")
    for value in row:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (above < value and abs(value) <= sys.float_info.max):
            raise ValueError(f"calibration's {name} have {value!r}; calibrate anew")
    return [float(value) for value in row]
