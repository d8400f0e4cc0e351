"""Resolves a sequence's drafts against its text: from emitted tokens to what drafts were worth.

Refuses to know: models, caches, and what is learnt from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .signals import DraftSignals, n_same_tokens

RECENT_START = 0.5
RECENT_SMOOTHING = 0.25  # per slot; about the last draft
COPY_SMOOTHING = 0.08  # per copy of lookup; about the last dozen


class DraftLedger:
    """Resolves one sequence's drafts against its text as it arrives, verified or not.

    The emitted text does not depend on drafts, so it decides every slot of a draft, the ones never
    sent to the target included.
    recent, recent_lookup: acceptance of the last few draft tokens of the drafter, and of lookup.
    recent_copies: mean share of right tokens of the last dozen copies of lookup.
    """

    __slots__ = ("_open", "recent", "recent_copies", "recent_lookup")

    def __init__(self) -> None:
        self._open: list[tuple[int, DraftSignals, int]] = []  # position, signals, n_correct so far
        self.recent = RECENT_START
        self.recent_lookup = RECENT_START
        self.recent_copies = RECENT_START

    def known(self, signals: DraftSignals) -> DraftSignals:
        """A new draft's signals, with the acceptance of its sequence so far."""
        if signals.match_len > 0:
            return replace(signals, recent=self.recent_lookup, recent_copies=self.recent_copies)
        return replace(signals, recent=self.recent)

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
        decided = [draft for draft in decided if draft[2] > 0]
        for draft in decided:
            self._remember(*draft)
        return decided

    def flush(self) -> list[tuple[DraftSignals, int, int]]:
        """End of the sequence: the open drafts of which at least one token was seen."""
        seen = [(signals, n, n) for _, signals, n in self._open if n > 0]
        self._open = []
        return seen

    def _remember(self, signals: DraftSignals, n_correct: int, n_seen: int) -> None:
        recent = self.recent_lookup if signals.match_len > 0 else self.recent
        n = n_decided(n_correct, n_seen)
        for slot in range(n):
            recent += RECENT_SMOOTHING * ((slot < n_correct) - recent)
        if signals.match_len > 0:
            self.recent_lookup = recent
            # One long copy fills the mean of slots; whether texts repeat themselves shows in many.
            self.recent_copies += COPY_SMOOTHING * (n_correct / n - self.recent_copies)
        else:
            self.recent = recent


def _agreement(draft: Sequence[int], text: Sequence[int]) -> tuple[int, bool]:
    """How many first tokens are equal, and whether the two then differ."""
    n = n_same_tokens(draft, text)
    return n, n < min(len(draft), len(text))


def n_decided(n_correct: int, n_seen: int) -> int:
    """Slots of a draft about which the text has spoken: the right ones and the first wrong one."""
    return min(n_correct + (n_correct < n_seen), n_seen)
