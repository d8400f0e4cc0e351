"""Prompt lookup: drafts by copying what followed the same tokens earlier in the sequence.

Owns: the index of one sequence's n-grams and the copy. Works with any target, at no cost.
Refuses to know: models, text, and whether its drafts are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MATCH_LEN_MAX = 16


@dataclass(slots=True)
class LookupProposal:
    """Draft tokens (maybe none) and the length of the match that they follow.

    match_len: how many last tokens of the sequence equal those before the copied place, up to 16;
    at least ngram_min when there are draft tokens, else 0.
    """

    tokens: list[int]
    match_len: int


class LookupDrafter:
    """Proposes the continuation of the latest earlier occurrence of the longest known n-gram."""

    __slots__ = ("_index", "_tokens")

    def __init__(self, *, ngram_max: int = 4, ngram_min: int = 2) -> None:
        """Raises ValueError unless 1 <= ngram_min <= ngram_max <= 16."""
        if not 1 <= ngram_min <= ngram_max <= MATCH_LEN_MAX:
            raise ValueError(
                f"ngram_min {ngram_min} and ngram_max {ngram_max} "
                f"must satisfy 1 <= min <= max <= {MATCH_LEN_MAX}"
            )
        self._tokens: list[int] = []
        # For each length, longest first: n-gram -> position of the token that followed it last.
        self._index: dict[int, dict[tuple[int, ...], int]] = {
            n: {} for n in range(ngram_max, ngram_min - 1, -1)
        }

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the prompt or of the reply."""
        for token in tokens:
            end = len(self._tokens)
            # An n-gram enters the index once a token follows it: the tail never finds itself.
            for n, followed_at in self._index.items():
                if n <= end:
                    followed_at[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first n_tokens. Indexes them anew: a rewind is rare.

        Raises ValueError when n_tokens is negative or more than the sequence has.
        """
        if not 0 <= n_tokens <= len(self):
            raise ValueError(f"n_tokens {n_tokens} is outside the sequence of {len(self)} tokens")
        if n_tokens == len(self):
            return
        kept, self._tokens = self._tokens[:n_tokens], []
        for followed_at in self._index.values():
            followed_at.clear()
        self.extend(kept)

    def propose(self, n_max: int) -> LookupProposal:
        """Up to n_max draft tokens for the positions after the sequence.

        The copy may run past the end into its own output, so a repetition is continued.
        """
        copy_from = self._find()
        if copy_from is None or n_max < 1:
            return LookupProposal(tokens=[], match_len=0)
        # Copying past the end repeats the last `period` tokens (LZ77's overlapping copy).
        period = len(self) - copy_from
        tokens = [self._tokens[copy_from + k % period] for k in range(n_max)]
        return LookupProposal(tokens=tokens, match_len=self._match_len(copy_from))

    def _find(self) -> int | None:
        for n, followed_at in self._index.items():
            if n <= len(self):
                copy_from = followed_at.get(tuple(self._tokens[-n:]))
                if copy_from is not None:
                    return copy_from
        return None

    def _match_len(self, copy_from: int) -> int:
        n = 0
        while (
            n < min(copy_from, MATCH_LEN_MAX)
            and self._tokens[copy_from - 1 - n] == (self._tokens[len(self) - 1 - n])
        ):
            n += 1
        return n
