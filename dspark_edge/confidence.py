"""From a draft's signals to survival, and from the emitted text back to what they were worth.

Owns: the calibration of confidence per position, and the ledger that resolves drafts against text.
Refuses to know: the scheduler, the cost of anything, and where tokens come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# One weight per feature: bias, confidence, certainty, match_len, recent acceptance.
Features = tuple[float, float, float, float, float]
PRIOR: Features = (0.0, 0.7, 0.3, 2.0, 0.5)  # 0.7: heads are over-confident

CONFIDENCE_EDGE = 1e-3  # a head that says 0 or 1 is read as this far from it
CERTAINTY_MIDDLE = math.log1p(1.0)  # a margin of 1 logit speaks neither for nor against
CERTAINTY_MAX = 50.0
MATCH_LEN_MAX = 16
RECENT_EDGE = 0.02
RECENT_SMOOTHING = 0.25  # per slot; about the last draft
LEARNING_RATE = 0.3
FORGETTING = 0.99  # of past squared gradients, so that learning never comes to rest
LOGIT_MAX = 12.0  # keeps every probability inside (0, 1)


@dataclass(slots=True)
class DraftSignals:
    """What a drafter said about one draft; lists run over its tokens.

    confidence: c_k in 0..1 from the drafter's head, None without one.
    certainty: score margin of the drawn token over the runner-up, in logits at the drafting
    temperature, at least 0; empty when the drafter has no scores (lookup).
    match_len: length in tokens of the match that a lookup draft follows.
    """

    tokens: list[int]
    confidence: list[float] | None
    certainty: list[float]
    match_len: int = 0


class SurvivalModel:
    """Per-position online logistic calibration of a draft's signals.

    Before any data a head's confidence is believed with scepticism, and a drafter without a head
    is right about half the time per slot. Learns by Adagrad with forgetting, one step per slot.
    """

    __slots__ = ("_counts", "_recent", "_squares", "_weights")

    def __init__(self, n_slots: int) -> None:
        """n_slots: longest draft in tokens. Raises ValueError when below 1."""
        if n_slots < 1:
            raise ValueError(f"n_slots {n_slots} is below 1; pass the drafter's block_size")
        self._weights = [list(PRIOR) for _ in range(n_slots)]
        self._squares = [[0.0] * len(PRIOR) for _ in range(n_slots)]
        self._counts = [(0, 0)] * n_slots
        self._recent = 0.5

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) of each slot, given that the slots before it were right."""
        return list(self._counts)

    def survival(self, signals: DraftSignals) -> list[float]:
        """a_k for each draft token: non-increasing, strictly between 0 and 1.

        Raises ValueError when the draft is longer than n_slots or its lists differ in length.
        """
        survival: list[float] = []
        a = 1.0
        for weights, x in zip(self._weights, self._features(signals), strict=False):
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
        features = self._features(signals)
        n_decided = min(n_correct + (n_correct < n_seen), n_seen)
        for slot in range(n_decided):
            right = slot < n_correct
            self._learn(slot, features[slot], right)
            self._recent += RECENT_SMOOTHING * (right - self._recent)

    def _learn(self, slot: int, x: Features, right: bool) -> None:
        weights, squares = self._weights[slot], self._squares[slot]
        error = _probability(weights, x) - right
        for i, value in enumerate(x):
            gradient = error * value
            squares[i] = FORGETTING * squares[i] + gradient * gradient
            weights[i] -= LEARNING_RATE * gradient / math.sqrt(1.0 + squares[i])
        n_right, n_observed = self._counts[slot]
        self._counts[slot] = (n_right + right, n_observed + 1)

    def _features(self, signals: DraftSignals) -> list[Features]:
        n_tokens = len(signals.tokens)
        if n_tokens > len(self._weights):
            raise ValueError(f"draft has {n_tokens} tokens but n_slots is {len(self._weights)}")
        confidence = _one_per_token(signals.confidence, n_tokens, "confidence")
        certainty = _one_per_token(signals.certainty or None, n_tokens, "certainty")
        match = math.log1p(min(signals.match_len, MATCH_LEN_MAX)) / math.log1p(MATCH_LEN_MAX)
        recent = _logit(self._recent, RECENT_EDGE)
        return [
            (1.0, _confidence_feature(c), _certainty_feature(margin), match, recent)
            for c, margin in zip(confidence, certainty, strict=True)
        ]


class DraftLedger:
    """Resolves one sequence's drafts against its text as it arrives, verified or not.

    The emitted text does not depend on drafts, so it decides every slot of a draft, the ones never
    sent to the target included.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[tuple[int, DraftSignals, int]] = []  # position, signals, n_correct so far

    def record(self, position: int, signals: DraftSignals) -> None:
        """Remember a draft; its token k (from 0) sits at absolute position `position` + k."""
        if signals.tokens:
            self._open.append((position, signals, 0))

    def resolve(self, position: int, tokens: Sequence[int]) -> list[tuple[DraftSignals, int, int]]:
        """Compare with the tokens emitted from `position` on.

        Returns the drafts that are now decided, as (signals, n_correct, n_seen). A draft that the
        text skips over (a gap in positions) ends with what was seen of it.
        """
        decided: list[tuple[DraftSignals, int, int]] = []
        still_open: list[tuple[int, DraftSignals, int]] = []
        for start, signals, n_correct in self._open:
            n_ahead = start + n_correct - position  # text before the draft's next undecided token
            gap = n_ahead < 0
            n_equal, wrong = 0, False
            if not gap:
                n_equal, wrong = _agreement(signals.tokens[n_correct:], tokens[n_ahead:])
            n_correct += n_equal
            if gap or wrong or n_correct == len(signals.tokens):
                decided.append((signals, n_correct, n_correct + wrong))
            else:
                still_open.append((start, signals, n_correct))
        self._open = still_open
        return [draft for draft in decided if draft[2] > 0]

    def flush(self) -> list[tuple[DraftSignals, int, int]]:
        """End of the sequence: the open drafts of which at least one token was seen."""
        seen = [(signals, n, n) for _, signals, n in self._open if n > 0]
        self._open = []
        return seen


def _agreement(draft: Sequence[int], text: Sequence[int]) -> tuple[int, bool]:
    """How many first tokens are equal, and whether the two then differ."""
    for n, (drafted, emitted) in enumerate(zip(draft, text, strict=False)):
        if drafted != emitted:
            return n, True
    return min(len(draft), len(text)), False


def _one_per_token(values: list[float] | None, n_tokens: int, name: str) -> list[float]:
    """The values, or NaN for each token where there are none."""
    if values is None:
        return [math.nan] * n_tokens
    if len(values) != n_tokens:
        raise ValueError(f"{name} has {len(values)} values but the draft has {n_tokens} tokens")
    return values


def _confidence_feature(c: float) -> float:
    return 0.0 if math.isnan(c) else _logit(c, CONFIDENCE_EDGE)


def _certainty_feature(margin: float) -> float:
    if math.isnan(margin):
        return 0.0
    return math.log1p(min(max(margin, 0.0), CERTAINTY_MAX)) - CERTAINTY_MIDDLE


def _logit(p: float, edge: float) -> float:
    p = min(max(p, edge), 1.0 - edge)
    return math.log(p / (1.0 - p))


def _probability(weights: Sequence[float], x: Features) -> float:
    logit = sum(w * value for w, value in zip(weights, x, strict=True))
    return 1.0 / (1.0 + math.exp(-min(max(logit, -LOGIT_MAX), LOGIT_MAX)))
