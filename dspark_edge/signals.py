"""What a proposer says of its draft, and the names of the features that it is judged by.

Refuses to know: the features' values (csrc/survival_model.cpp makes them), weights, the cost of
anything, and where tokens come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import Comparison, LookupProposal

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


@dataclass(slots=True)
class DraftSignals:
    """What a drafter said about one draft; lists run over its tokens.

    The core reads the fields by name, and makes a new draft by their order
    (csrc/bindings_survival.cpp).

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


def in_all_features(signals: DraftSignals, row: Features) -> Features:
    """A row of SurvivalModel.features, with those of the other kinds of tokens."""
    place = KINDS[signals.kind]
    return (*(0.0,) * place.start, *row, *(0.0,) * (len(FEATURES) - place.stop))


def n_same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two drafts share."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))
