"""What a proposer says of its draft, and the features that survival is estimated from.

Refuses to know: weights, the cost of anything, and where tokens come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# One weight per feature. A drafter's tokens and those of lookup share none, so that one model can
# serve both.
FEATURES = (
    "drafter",  # 1 for a drafter's token
    "confidence",  # logit of c_k
    "log_margin",  # certainty, where small differences count ...
    "margin",  # ... and where large ones do
    "recent",  # logit of this sequence's recent acceptance
    "same",  # 1 where lookup proposes the same token after the same ones ...
    "other",  # ... and where it proposes another one
    "rival",  # logit of lookup's token alone, negative where it is another one
    "lookup",  # 1 for a token of lookup
    "match_len",
    "agreement",  # certainty of lookup
    "recent_lookup",  # logit of this sequence's recent acceptance of lookup
    "recent_copies",  # the same over more of it, each copy counted once
    "same_lookup",  # as above, of the drafter's token
    "other_lookup",
    "rival_lookup",
)
N_DRAFTER = FEATURES.index("lookup")
N_LOOKUP = len(FEATURES) - N_DRAFTER
Features = tuple[float, ...]
_NO_DRAFTER = (0.0,) * N_DRAFTER
_NO_LOOKUP = (0.0,) * N_LOOKUP
_NO_RIVAL = (0.0, 0.0, 0.0)

CONFIDENCE_EDGE = 1e-3  # a head that says 0 or 1 is read as this far from it
MARGIN_MIDDLE = 1.0  # logits; speaks neither for nor against
LOG_MARGIN_MIDDLE = math.log1p(MARGIN_MIDDLE)
MARGIN_MAX = 20.0
MARGIN_UNIT = 2.0
MATCH_LEN_MAX = 16
MATCH_UNIT = math.log1p(MATCH_LEN_MAX)
AGREEMENT_MAX = 4.0  # about 27 times one way, never another
RIVAL_MAX = 4.0  # logits
RECENT_EDGE = 0.02


@dataclass(slots=True, frozen=True)
class Comparison:
    """How a draft compares with the other proposer's for the same place.

    n_same: first tokens that both have. logits: of those in the other's draft, as it is believed
    alone, and of the first that differs, if both have one there.
    """

    n_same: int
    logits: list[float]

    def features(self, k: int) -> tuple[float, float, float]:
        """same, other and rival of token k, from 0."""
        if k >= len(self.logits):
            return _NO_RIVAL
        z = self.logits[k]
        return (1.0, 0.0, z) if k < self.n_same else (0.0, 1.0, -z)


@dataclass(slots=True)
class DraftSignals:
    """What a drafter said about one draft; lists run over its tokens.

    confidence: c_k in 0..1 from the drafter's head, None without one.
    certainty: score margin of the drawn token over the runner-up, in logits at the drafting
    temperature, at least 0; for lookup its agreement (LookupProposal); empty when there is none.
    match_len: length in tokens of the match that a lookup draft follows; 0 for a drafter's.
    recent: this sequence's recent acceptance when the draft was made (DraftLedger.recent); None
    where the caller keeps no history per sequence: then that of all sequences counts.
    recent_copies: of a lookup draft, DraftLedger.recent_copies then; None: recent counts again.
    rival: set where the other proposer drafted as well.
    """

    tokens: list[int]
    confidence: list[float] | None
    certainty: list[float]
    match_len: int = 0
    recent: float | None = None
    rival: Comparison | None = None
    recent_copies: float | None = None


NOTHING = DraftSignals(tokens=[], confidence=None, certainty=[])


def features_of(signals: DraftSignals, recent: float) -> Iterator[Features]:
    """One row per draft token, of its own proposer's features alone: the others would be 0.

    recent: acceptance to assume where the signals know none. Made one by one, since few tokens of a
    long copy are asked for. Raises ValueError when the lists differ in length.
    """
    n_tokens = len(signals.tokens)
    confidence = _one_per_token(signals.confidence, n_tokens, "confidence")
    certainty = _one_per_token(signals.certainty or None, n_tokens, "certainty")
    recent = logit(recent if signals.recent is None else signals.recent, RECENT_EDGE)
    rival = signals.rival
    if signals.match_len > 0:
        match = math.log1p(min(signals.match_len, MATCH_LEN_MAX)) / MATCH_UNIT
        copies = signals.recent_copies
        longer = recent if copies is None else logit(copies, RECENT_EDGE)
        for k, odds in enumerate(certainty):
            agreement = min(max(odds, -AGREEMENT_MAX), AGREEMENT_MAX) if odds == odds else 0.0
            own = (1.0, match, agreement, recent, longer)
            yield (*own, *(rival.features(k) if rival else _NO_RIVAL))
    else:
        for k, (c, margin) in enumerate(zip(confidence, certainty, strict=True)):
            own = (1.0, _confidence_feature(c), *_certainty_features(margin), recent)
            yield (*own, *(rival.features(k) if rival else _NO_RIVAL))


def in_all_features(signals: DraftSignals, row: Features) -> Features:
    """A row of features_of, with those of the other proposer."""
    return (*_NO_DRAFTER, *row) if signals.match_len > 0 else (*row, *_NO_LOOKUP)


def n_same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two drafts share."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))


def logit(p: float, edge: float) -> float:
    """Log odds of p, which is kept `edge` away from 0 and 1."""
    p = min(max(p, edge), 1.0 - edge)
    return math.log(p / (1.0 - p))


def _one_per_token(values: list[float] | None, n_tokens: int, name: str) -> list[float]:
    """The values, or NaN for each token where there are none."""
    if values is None:
        return [math.nan] * n_tokens
    if len(values) != n_tokens:
        raise ValueError(f"{name} has {len(values)} values but the draft has {n_tokens} tokens")
    return values


def _confidence_feature(c: float) -> float:
    return 0.0 if math.isnan(c) else logit(c, CONFIDENCE_EDGE)


def _certainty_features(margin: float) -> tuple[float, float]:
    if math.isnan(margin):
        return 0.0, 0.0
    margin = min(max(margin, 0.0), MARGIN_MAX)
    return math.log1p(margin) - LOG_MARGIN_MIDDLE, (margin - MARGIN_MIDDLE) / MARGIN_UNIT
