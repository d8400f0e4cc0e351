"""Prompt lookup: the latest earlier occurrence of the longest n-gram, copied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_edge.lookup import LookupDrafter, LookupProposal


def a_drafter(tokens: list[int], *, ngram_max: int = 4, ngram_min: int = 2) -> LookupDrafter:
    drafter = LookupDrafter(ngram_max=ngram_max, ngram_min=ngram_min)
    drafter.extend(tokens)
    return drafter


def test_what_followed_the_same_tokens_is_proposed() -> None:
    drafter = a_drafter([1, 2, 3, 4, 5, 9, 1, 2])
    assert drafter.propose(3) == LookupProposal(tokens=[3, 4, 5], match_len=2)


def test_nothing_known_proposes_nothing() -> None:
    assert a_drafter([1, 2, 3]).propose(4) == LookupProposal(tokens=[], match_len=0)


def test_an_empty_sequence_proposes_nothing() -> None:
    assert LookupDrafter().propose(4) == LookupProposal(tokens=[], match_len=0)


def test_no_room_proposes_nothing() -> None:
    assert a_drafter([1, 2, 1, 2]).propose(0) == LookupProposal(tokens=[], match_len=0)


def test_the_longest_ngram_wins_over_a_later_shorter_one() -> None:
    drafter = a_drafter([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2])
    assert drafter.propose(1) == LookupProposal(tokens=[50], match_len=3)


def test_the_latest_of_equal_occurrences_wins() -> None:
    assert a_drafter([1, 2, 50, 1, 2, 60, 1, 2]).propose(1).tokens == [60]


def test_one_token_is_too_short_a_match() -> None:
    assert a_drafter([5, 1, 6, 1]).propose(1).tokens == []


def test_ngram_min_1_accepts_a_match_of_one_token() -> None:
    drafter = a_drafter([5, 1, 6, 1], ngram_min=1)
    assert drafter.propose(1) == LookupProposal(tokens=[6], match_len=1)


def test_a_repetition_is_continued_past_the_end() -> None:
    assert a_drafter([1, 2, 1, 2]).propose(5).tokens == [1, 2, 1, 2, 1]


def test_a_run_of_one_token_is_continued() -> None:
    assert a_drafter([4, 4, 4]).propose(3).tokens == [4, 4, 4]


def test_the_match_is_measured_beyond_the_ngram() -> None:
    drafter = a_drafter([0, 1, 2, 3, 4, 5, 6, 7, 99, 1, 2, 3, 4, 5, 6, 7])
    assert drafter.propose(1) == LookupProposal(tokens=[99], match_len=7)


def test_the_match_is_measured_up_to_16_tokens() -> None:
    assert a_drafter([*range(40), *range(40)]).propose(1).match_len == 16


def test_truncate_forgets_what_was_cut() -> None:
    drafter = a_drafter([1, 2, 50, 1, 2, 60, 1, 2])
    drafter.truncate(5)
    assert len(drafter) == 5
    assert drafter.propose(2).tokens == [50, 1]


def test_truncate_to_nothing_is_a_fresh_drafter() -> None:
    drafter = a_drafter([1, 2, 1, 2])
    drafter.truncate(0)
    drafter.extend([1, 2])
    assert drafter.propose(1).tokens == []


@pytest.mark.parametrize("n_tokens", [-1, 5])
def test_truncate_outside_the_sequence_is_refused(n_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"n_tokens {n_tokens} is outside the sequence of 4"):
        a_drafter([1, 2, 1, 2]).truncate(n_tokens)


def test_ngram_lengths_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="ngram_min 3 and ngram_max 2 must satisfy"):
        LookupDrafter(ngram_max=2, ngram_min=3)


def by_definition(tokens: list[int], n_max: int) -> LookupProposal:
    for n in (4, 3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                copied = list(tokens)
                for k in range(n_max):
                    copied.append(copied[end + k])
                match_len = n
                while match_len < min(end, 16) and (
                    tokens[end - match_len - 1] == tokens[-match_len - 1]
                ):
                    match_len += 1
                return LookupProposal(copied[len(tokens) :], match_len)
    return LookupProposal([], 0)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_proposals_equal_the_definition(tokens: list[int], n_max: int) -> None:
    assert a_drafter(tokens).propose(n_max) == by_definition(tokens, n_max)


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 2), max_size=20),
)
def test_a_rewind_leaves_no_trace(kept: list[int], cut: list[int], after: list[int]) -> None:
    drafter = a_drafter(kept + cut)
    drafter.truncate(len(kept))
    drafter.extend(after)
    assert drafter.propose(6) == by_definition(kept + after, 6)
