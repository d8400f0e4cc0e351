"""What a proposer says of its draft, and the features that survival is estimated from.

Refuses to know: weights, the cost of anything, and where tokens come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import LookupProposal

_DRAFTER = (
    "drafter",  # 1 for a drafter's token
    "confidence",  # logit of c_k
    "log_margin",  # certainty, where small differences count ...
    "margin",  # ... and where large ones do
    "recent",  # logit of this sequence's recent acceptance
    "same",  # 1 where lookup proposes the same token after the same ones ...
    "other",  # ... and where it proposes another one
    "rival",  # logit of lookup's token alone, negative where it is another one
)
_LOOKUP = (
    "lookup",  # 1 for a token of lookup that is copied from the sequence itself
    "match_len",
    "agreement",  # certainty of lookup
    "recent_lookup",  # logit of this sequence's recent acceptance of lookup
    "recent_copies",  # the same over more of it, each copy counted once
    "same_lookup",  # as above, of the drafter's token
    "other_lookup",
    "rival_lookup",
    "cache_agreement",  # what the lookup cache says of it ...
    "cache_count",  # ... and out of how many cases
)
_CACHED = tuple(f"{name}_cached" for name in _LOOKUP)  # of lookup's tokens out of the cache
# One weight per feature. The three kinds of tokens share none, so that one model can serve all.
FEATURES = _DRAFTER + _LOOKUP + _CACHED
N_DRAFTER = len(_DRAFTER)
N_LOOKUP = len(_LOOKUP)
DRAFTED, COPIED, CACHED = range(3)  # the kinds of tokens, and where each has its features
KINDS = (
    slice(0, N_DRAFTER),
    slice(N_DRAFTER, N_DRAFTER + N_LOOKUP),
    slice(N_DRAFTER + N_LOOKUP, len(FEATURES)),
)
Features = tuple[float, ...]
_NO_RIVAL = (0.0, 0.0, 0.0)
_NO_CACHE = (0.0, 0.0)

CONFIDENCE_EDGE = 1e-3  # a head that says 0 or 1 is read as this far from it
MARGIN_MIDDLE = 1.0  # logits; speaks neither for nor against
LOG_MARGIN_MIDDLE = math.log1p(MARGIN_MIDDLE)
MARGIN_MAX = 20.0
MARGIN_UNIT = 2.0
MATCH_LEN_MAX = 16
MATCH_UNIT = math.log1p(MATCH_LEN_MAX)
AGREEMENT_MAX = 4.0  # about 27 times one way, never another
CACHE_COUNT_UNIT = 5.0  # of log1p: about 150 cases
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
    is_cached: a lookup draft out of the lookup cache, not copied from the sequence; match_len is
    then of the cache. cache_agreement, cache_count: what the cache says of each token of lookup
    (LookupProposal); empty without a cache.
    """

    tokens: list[int]
    confidence: list[float] | None
    certainty: list[float]
    match_len: int = 0
    recent: float | None = None
    rival: Comparison | None = None
    recent_copies: float | None = None
    is_cached: bool = False
    cache_agreement: list[float] = field(default_factory=list)
    cache_count: list[int] = field(default_factory=list)

    @property
    def kind(self) -> int:
        """DRAFTED, COPIED or CACHED."""
        return 1 + self.is_cached if self.match_len > 0 else DRAFTED


def looked_up(
    found: LookupProposal, recent: float | None = None, recent_copies: float | None = None
) -> DraftSignals:
    """The signals of lookup's proposal."""
    return DraftSignals(
        found.tokens,
        None,
        found.agreement,
        found.match_len,
        recent,
        None,
        recent_copies,
        found.is_cached,
        found.cache_agreement,
        found.cache_count,
    )


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
        cached = _cache_features(signals)
        for odds, k, cache in zip(certainty, count(), cached, strict=False):
            agreement = min(max(odds, -AGREEMENT_MAX), AGREEMENT_MAX) if odds == odds else 0.0
            own = (1.0, match, agreement, recent, longer)
            yield (*own, *(rival.features(k) if rival else _NO_RIVAL), *cache)
    else:
        for k, (c, margin) in enumerate(zip(confidence, certainty, strict=True)):
            own = (1.0, _confidence_feature(c), *_certainty_features(margin), recent)
            yield (*own, *(rival.features(k) if rival else _NO_RIVAL))


def _cache_features(signals: DraftSignals) -> Iterator[tuple[float, float]]:
    if not signals.cache_count:
        return repeat(_NO_CACHE)
    n_tokens = len(signals.tokens)
    agreement = _one_per_token(signals.cache_agreement, n_tokens, "cache_agreement")
    if len(signals.cache_count) != n_tokens:
        raise ValueError(
            f"cache_count has {len(signals.cache_count)} values but the draft has {n_tokens} tokens"
        )
    return (
        (odds, math.log1p(n) / CACHE_COUNT_UNIT)
        for odds, n in zip(agreement, signals.cache_count, strict=True)
    )


def in_all_features(signals: DraftSignals, row: Features) -> Features:
    """A row of features_of, with those of the other kinds of tokens."""
    place = KINDS[signals.kind]
    return (*(0.0,) * place.start, *row, *(0.0,) * (len(FEATURES) - place.stop))


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
