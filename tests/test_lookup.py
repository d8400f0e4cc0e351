"""Prompt lookup: the latest earlier occurrence of the longest n-gram, copied."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_edge.lookup import LookupDrafter, LookupProposal


def a_drafter(tokens: list[int]) -> LookupDrafter:
    drafter = LookupDrafter()
    drafter.extend(tokens)
    return drafter


def test_what_followed_the_same_tokens_is_proposed() -> None:
    drafter = a_drafter([1, 2, 3, 4, 5, 9, 1, 2])
    assert drafter.propose(3).tokens == [3, 4, 5]
    assert drafter.propose(3).match_len == 2


def test_nothing_known_proposes_nothing() -> None:
    assert a_drafter([1, 2, 3]).propose(4) == LookupProposal(tokens=[], match_len=0)


def test_an_empty_sequence_proposes_nothing() -> None:
    assert LookupDrafter().propose(4) == LookupProposal(tokens=[], match_len=0)


def test_no_room_proposes_nothing() -> None:
    assert a_drafter([1, 2, 1, 2]).propose(0) == LookupProposal(tokens=[], match_len=0)


@pytest.mark.parametrize(("n_same", "n_copied"), [(2, 8), (8, 8), (11, 11), (20, 16)])
def test_a_long_match_is_followed_as_far_as_it_is_long(n_same: int, n_copied: int) -> None:
    tokens = [*range(60), 99, *range(n_same)]
    proposal = a_drafter(tokens).propose(20)
    assert proposal.tokens == list(range(n_same, n_same + n_copied))


def test_the_longest_ngram_wins_over_a_later_shorter_one() -> None:
    drafter = a_drafter([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2])
    assert drafter.propose(1).tokens == [50]
    assert drafter.propose(1).match_len == 3


def test_the_latest_of_equal_occurrences_wins() -> None:
    assert a_drafter([1, 2, 50, 1, 2, 60, 1, 2]).propose(1).tokens == [60]


def test_one_token_is_too_short_a_match() -> None:
    assert a_drafter([5, 1, 6, 1]).propose(1).tokens == []


def test_a_repetition_is_continued_past_the_end() -> None:
    assert a_drafter([1, 2, 1, 2]).propose(5).tokens == [1, 2, 1, 2, 1]


def test_a_run_of_one_token_is_continued() -> None:
    assert a_drafter([4, 4, 4]).propose(3).tokens == [4, 4, 4]


def test_the_match_is_measured_beyond_the_ngram() -> None:
    drafter = a_drafter([0, 1, 2, 3, 4, 5, 6, 7, 99, 1, 2, 3, 4, 5, 6, 7])
    assert drafter.propose(1).match_len == 7


def test_the_match_is_measured_up_to_16_tokens() -> None:
    assert a_drafter([*range(40), *range(40)]).propose(1).match_len == 16


def test_agreement_is_one_of_counts() -> None:
    # After 1 2 came 50, 50 and 60; the copy goes on with 60 and then 1, which followed once.
    proposal = a_drafter([1, 2, 50, 1, 2, 50, 1, 2, 60, 1, 2]).propose(2)
    assert proposal.tokens == [60, 1]
    assert proposal.agreement == pytest.approx([math.log(1.5 / 2.5), math.log(1.5 / 0.5)])


def agreement(tokens: list[int], copied: list[int]) -> list[float]:
    def n_followed(ngram: list[int]) -> int:
        n = len(ngram)
        return sum(tokens[i : i + n] == ngram for i in range(len(tokens) - n))

    odds = []
    for end in range(len(tokens), len(copied)):
        n_all = n_followed(copied[end - 2 : end])
        n_same = min(n_followed(copied[end - 2 : end + 1]), n_all)
        odds.append(math.log((n_same + 0.5) / (n_all - n_same + 0.5)))
    return odds


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
                return LookupProposal(copied[len(tokens) :], match_len, agreement(tokens, copied))
    return LookupProposal([], 0)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_proposals_equal_the_definition(tokens: list[int], n_max: int) -> None:
    assert a_drafter(tokens).propose(n_max) == by_definition(tokens, n_max)
