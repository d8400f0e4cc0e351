"""Prompt lookup: drafts by copying what followed the same tokens earlier in the sequence.

Owns: the index of one sequence's n-grams and the copy. Works with any target, at no cost.
Refuses to know: models, text, and whether its drafts are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

NGRAM_LENS = (4, 3, 2)  # longest first
MATCH_LEN_MAX = 16
SHORT_COPY = 8  # draft tokens that any match is worth; a longer one is followed as far as it goes

# n-gram -> position of the token that followed it last, and how many tokens have followed it
Index = dict[tuple[int, ...], tuple[int, int]]


@dataclass(slots=True)
class LookupProposal:
    """Draft tokens (maybe none), the length of the match that they follow, and their record.

    match_len: how many last tokens of the sequence equal those before the copied place, 2 to 16;
    0 when there are no draft tokens.
    agreement: for each draft token, the log odds that it is what follows the two tokens before it,
    counted over the sequence so far (half a count is added to both sides).
    """

    tokens: list[int]
    match_len: int
    agreement: list[float] = field(default_factory=list)


class LookupDrafter:
    """Proposes the continuation of the latest earlier occurrence of the longest known n-gram."""

    __slots__ = ("_index", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._index: dict[int, Index] = {n: {} for n in NGRAM_LENS}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the prompt or of the reply."""
        for token in tokens:
            end = len(self._tokens)
            # An n-gram enters the index once a token follows it: the tail never finds itself.
            for n, followed in self._index.items():
                if n <= end:
                    ngram = tuple(self._tokens[end - n :])
                    _, n_times = followed.get(ngram, (0, 0))
                    followed[ngram] = (end, n_times + 1)
            self._tokens.append(token)

    def propose(self, n_max: int) -> LookupProposal:
        """Up to n_max draft tokens for the positions after the sequence.

        After a short match fewer: what is hardly ever right costs time to estimate. The copy may
        run past the end into its own output, so a repetition is continued.
        """
        copy_from = self._find()
        if copy_from is None or n_max < 1:
            return LookupProposal(tokens=[], match_len=0)
        # Copying past the end repeats the last `period` tokens (LZ77's overlapping copy).
        period = len(self) - copy_from
        match_len = self._match_len(copy_from)
        n_copied = min(n_max, max(SHORT_COPY, match_len))
        tokens = [self._tokens[copy_from + k % period] for k in range(n_copied)]
        return LookupProposal(tokens, match_len, self._agreement(tokens))

    def _find(self) -> int | None:
        for n, followed in self._index.items():
            if n <= len(self):
                found = followed.get(tuple(self._tokens[-n:]))
                if found is not None:
                    return found[0]
        return None

    def _match_len(self, copy_from: int) -> int:
        n = 0
        while (
            n < min(copy_from, MATCH_LEN_MAX)
            and self._tokens[copy_from - 1 - n] == (self._tokens[len(self) - 1 - n])
        ):
            n += 1
        return n

    def _agreement(self, tokens: Sequence[int]) -> list[float]:
        pairs, triples = self._index[2], self._index[3]
        a, b = self._tokens[-2:]
        agreement = []
        for token in tokens:
            # A token's own occurrence at the end of the sequence is in no count: nothing follows.
            n_all = pairs.get((a, b), (0, 0))[1]
            n_same = min(triples.get((a, b, token), (0, 0))[1], n_all)
            agreement.append(math.log((n_same + 0.5) / (n_all - n_same + 0.5)))
            a, b = b, token
        return agreement
