"""Prompt lookup: the latest earlier occurrence of the longest n-gram, copied; the static cache."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_edge._core import LookupCache, LookupIndex, LookupProposal

NOTHING = LookupProposal([], 0, False, [], [], [])
MAX_TOKEN = 2**31 - 1

Entries = list[tuple[list[int], int]]  # contexts and what followed them


def a_cache(*replies: list[int]) -> LookupCache:
    tokens = [token for reply in replies for token in reply]
    return LookupCache(np.array(tokens, np.int32), np.array([*map(len, replies)], np.int32))


def an_index(tokens: list[int], cache: LookupCache | None = None) -> LookupIndex:
    index = LookupIndex(cache)
    index.extend(tokens)
    return index


def test_what_followed_the_same_tokens_is_proposed() -> None:
    index = an_index([1, 2, 3, 4, 5, 9, 1, 2])
    assert index.propose(3).tokens == [3, 4, 5]
    assert index.propose(3).match_len == 2


def test_nothing_known_proposes_nothing() -> None:
    assert an_index([1, 2, 3]).propose(4) == NOTHING


def test_an_empty_sequence_proposes_nothing() -> None:
    assert LookupIndex().propose(4) == NOTHING


def test_no_room_proposes_nothing() -> None:
    assert an_index([1, 2, 1, 2]).propose(0) == NOTHING


@pytest.mark.parametrize(("n_same", "n_copied"), [(2, 8), (8, 8), (11, 11), (20, 16)])
def test_a_long_match_is_followed_as_far_as_it_is_long(n_same: int, n_copied: int) -> None:
    tokens = [*range(60), 99, *range(n_same)]
    proposal = an_index(tokens).propose(20)
    assert proposal.tokens == list(range(n_same, n_same + n_copied))


def test_the_longest_ngram_wins_over_a_later_shorter_one() -> None:
    index = an_index([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2])
    assert index.propose(1).tokens == [50]
    assert index.propose(1).match_len == 3


def test_the_latest_of_equal_occurrences_wins() -> None:
    assert an_index([1, 2, 50, 1, 2, 60, 1, 2]).propose(1).tokens == [60]


def test_one_token_is_too_short_a_match() -> None:
    assert an_index([5, 1, 6, 1]).propose(1).tokens == []


def test_a_repetition_is_continued_past_the_end() -> None:
    assert an_index([1, 2, 1, 2]).propose(5).tokens == [1, 2, 1, 2, 1]


def test_a_run_of_one_token_is_continued() -> None:
    assert an_index([4, 4, 4]).propose(3).tokens == [4, 4, 4]


def test_the_match_is_measured_beyond_the_ngram() -> None:
    index = an_index([0, 1, 2, 3, 4, 5, 6, 7, 99, 1, 2, 3, 4, 5, 6, 7])
    assert index.propose(1).match_len == 7


def test_the_match_is_measured_up_to_16_tokens() -> None:
    assert an_index([*range(40), *range(40)]).propose(1).match_len == 16


def test_agreement_is_one_of_counts() -> None:
    # After 1 2 came 50, 50 and 60; the copy goes on with 60 and then 1, which followed once.
    proposal = an_index([1, 2, 50, 1, 2, 50, 1, 2, 60, 1, 2]).propose(2)
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


def own_copy(tokens: list[int], n_max: int) -> tuple[list[int], int]:
    """The copy and the length of its match."""
    for n in (4, 3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                match_len = n
                while match_len < min(end, 16) and (
                    tokens[end - match_len - 1] == tokens[-match_len - 1]
                ):
                    match_len += 1
                copied = list(tokens)
                for k in range(min(n_max, max(8, match_len))):
                    copied.append(copied[end + k])
                return copied[len(tokens) :], match_len
    return [], 0


def entries_of(replies: list[list[int]]) -> Entries:
    """Ordered by their contexts, read backwards."""
    entries = [
        (reply[max(i - 6, 0) : i], reply[i]) for reply in replies for i in range(3, len(reply))
    ]
    return sorted(entries, key=lambda entry: entry[0][::-1])


def followers(entries: Entries, context: list[int]) -> tuple[list[int], int]:
    """The tokens that followed the longest known end of a context, and that end's length."""
    for n in range(min(6, len(context)), 2, -1):
        found = [token for before, token in entries if before[-n:] == context[-n:]]
        if found:
            return found[:128], n
    return [], 0


def cache_walk(entries: Entries, tokens: list[int], n_max: int) -> tuple[list[int], int]:
    walked = list(tokens)
    known, match_len = followers(entries, walked)
    while known and len(walked) < len(tokens) + min(n_max, 8):
        counts = Counter(known)
        walked.append(min(counts, key=lambda token: (-counts[token], token)))
        known, _ = followers(entries, walked)
    return walked[len(tokens) :], match_len


def by_definition(
    tokens: list[int], n_max: int, replies: list[list[int]] | None = None
) -> LookupProposal:
    proposed, match_len = own_copy(tokens, n_max)
    entries = entries_of(replies or [])
    is_cached = match_len < 3 and followers(entries, tokens)[1] > 0
    if is_cached:
        proposed, match_len = cache_walk(entries, tokens, n_max)
    odds, counts = [], []
    for k, token in enumerate(proposed if replies is not None else []):
        known, _ = followers(entries, tokens + proposed[:k])
        n_same = known.count(token)
        odds.append(min(max(math.log((n_same + 0.5) / (len(known) - n_same + 0.5)), -4.0), 4.0))
        counts.append(len(known))
    own_odds = agreement(tokens, tokens + proposed)
    return LookupProposal(proposed, match_len, is_cached, own_odds, odds, counts)


def assert_equal(one: LookupProposal, other: LookupProposal) -> None:
    assert one._replace(agreement=[], cache_agreement=[]) == other._replace(
        agreement=[], cache_agreement=[]
    )
    assert one.agreement == pytest.approx(other.agreement, abs=1e-12)
    assert one.cache_agreement == pytest.approx(other.cache_agreement, abs=1e-12)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 20))
def test_proposals_equal_the_definition(tokens: list[int], n_max: int) -> None:
    assert_equal(an_index(tokens).propose(n_max), by_definition(tokens, n_max))


@given(
    st.integers(1, 5).flatmap(
        lambda top: st.tuples(
            st.lists(st.lists(st.integers(0, top), max_size=30), max_size=6),
            st.lists(st.integers(0, top), max_size=20),
        )
    ),
    st.integers(1, 20),
)
def test_proposals_with_a_cache_equal_the_definition(
    texts: tuple[list[list[int]], list[int]], n_max: int
) -> None:
    replies, tokens = texts
    proposal = an_index(tokens, a_cache(*replies)).propose(n_max)
    assert_equal(proposal, by_definition(tokens, n_max, replies))


@pytest.mark.parametrize("n_tokens", [40, 1500])
def test_many_tokens_equal_the_definition_too(n_tokens: int) -> None:
    # Enough for the tables to grow, for more than 128 entries, and for contexts of each length.
    random = np.random.default_rng(1)
    replies = [random.geometric(0.4, n_tokens).tolist() for _ in range(4)]
    tokens = random.geometric(0.2, n_tokens).tolist()
    cache, index = a_cache(*replies), LookupIndex()
    for end in range(n_tokens - 10, n_tokens):
        index = an_index(tokens[:end], cache)
        assert_equal(index.propose(16), by_definition(tokens[:end], 16, replies))


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12))
def test_tokens_may_come_bit_by_bit(parts: list[list[int]]) -> None:
    index = LookupIndex()
    for part in parts:
        index.extend(part)
    tokens = [token for part in parts for token in part]
    assert len(index) == len(tokens)
    assert index.propose(16) == an_index(tokens).propose(16)


def test_the_cache_goes_on_where_the_sequence_knows_nothing() -> None:
    proposal = an_index([1, 2, 3], a_cache([1, 2, 3, 4, 5, 6])).propose(9)
    assert proposal.tokens == [4, 5, 6]
    assert (proposal.match_len, proposal.is_cached) == (3, True)
    assert proposal.cache_count == [1, 1, 1]
    assert proposal.cache_agreement == pytest.approx([math.log(3.0)] * 3)
    assert proposal.agreement == [0.0, 0.0, 0.0]


def test_the_cache_proposes_eight_tokens_at_most() -> None:
    index = an_index([1, 1, 1, 2, 3, 4], a_cache([*range(40)]))
    assert index.propose(16).tokens == [*range(5, 13)]
    assert index.propose(3).tokens == [5, 6, 7]


def test_no_room_is_no_room_for_the_cache_either() -> None:
    assert an_index([1, 2, 3], a_cache([1, 2, 3, 4])).propose(0) == NOTHING


def test_a_match_of_three_tokens_goes_before_the_cache() -> None:
    cache = a_cache([1, 2, 3, 4])
    long, short = [1, 2, 3, 9, 1, 2, 3], [7, 2, 3, 9, 1, 2, 3]
    proposal = an_index(long, cache).propose(1)
    assert (proposal.tokens, proposal.match_len, proposal.is_cached) == ([9], 3, False)
    assert proposal.cache_agreement == pytest.approx([-math.log(3.0)])
    assert an_index(short, cache).propose(1).tokens == [4]
    assert an_index(short).propose(1).tokens == [9]


def test_the_longest_context_wins() -> None:
    replies = [[0, 1, 2, 3, 50], [7, 1, 2, 3, 60], [8, 1, 2, 3, 60]]
    proposal = an_index([0, 1, 2, 3], a_cache(*replies)).propose(1)
    assert (proposal.tokens, proposal.match_len, proposal.cache_count) == ([50], 4, [1])
    proposal = an_index([9, 1, 2, 3], a_cache(*replies)).propose(1)
    assert (proposal.tokens, proposal.match_len, proposal.cache_count) == ([60], 3, [3])


def test_a_context_is_six_tokens_at_most() -> None:
    assert an_index([*range(9)], a_cache([*range(10)])).propose(1).match_len == 6


def test_of_equally_counted_tokens_the_smaller_id_wins() -> None:
    replies = [[1, 2, 3, token] for token in (9, 5, 7, 7, 5, 9)]
    assert an_index([1, 2, 3], a_cache(*replies)).propose(1).tokens == [5]


def test_no_more_than_128_entries_count() -> None:
    replies = [[1, 2, 3, 4]] * 100 + [[1, 2, 3, 5]] * 200
    proposal = an_index([1, 2, 3], a_cache(*replies)).propose(1)
    assert (proposal.tokens, proposal.cache_count) == ([4], [128])
    assert proposal.cache_agreement == pytest.approx([math.log(100.5 / 28.5)])


def test_what_the_cache_says_is_held_to_four() -> None:
    cache = a_cache(*[[1, 2, 3, 4]] * 128)
    assert an_index([1, 2, 3], cache).propose(1).cache_agreement == [4.0]
    assert an_index([1, 2, 3, 9, 1, 2, 3], cache).propose(1).cache_agreement == [-4.0]


def test_the_end_of_a_reply_is_never_crossed() -> None:
    cache = a_cache([1, 2, 3], [4, 5, 6, 7])
    for tokens in ([1, 2, 3], [2, 3, 4], [3, 4, 5]):
        assert an_index(tokens, cache).propose(8) == NOTHING
    # A longer context does not reach across it either.
    assert an_index([3, 4, 5, 6], cache).propose(8).match_len == 3


def test_too_short_a_sequence_has_no_context() -> None:
    assert an_index([2, 3], a_cache([1, 2, 3, 4])).propose(8) == NOTHING


@pytest.mark.parametrize("replies", [[], [[]], [[1, 2, 3]]])
def test_a_cache_without_entries_knows_nothing(replies: list[list[int]]) -> None:
    cache = a_cache(*replies)
    assert an_index([1, 2, 3], cache).propose(8) == NOTHING
    proposal = an_index([1, 2, 1, 2], cache).propose(2)
    assert proposal.tokens == [1, 2]
    assert (proposal.cache_agreement, proposal.cache_count) == ([0.0, 0.0], [0, 0])


def test_a_cache_tells_its_size() -> None:
    cache = a_cache([1, 70, 3], [2])
    assert (cache.n_tokens, cache.max_token) == (4, 70)
    assert (a_cache().n_tokens, a_cache().max_token) == (0, -1)


def test_the_largest_token_is_one_like_others() -> None:
    text = [MAX_TOKEN] * 3 + [0]
    cache = a_cache(text)
    assert cache.max_token == MAX_TOKEN
    assert an_index([MAX_TOKEN] * 2, cache).propose(1) == NOTHING
    assert an_index([5, MAX_TOKEN - 1, MAX_TOKEN, MAX_TOKEN], cache).propose(1) == NOTHING
    assert an_index([MAX_TOKEN, 0, MAX_TOKEN, 0]).propose(1).tokens == [MAX_TOKEN]
    assert an_index([0, *text[:3]], a_cache([0, *text[:3], MAX_TOKEN])).propose(1).tokens == [
        MAX_TOKEN
    ]


def test_the_cache_outlives_its_name() -> None:
    index = an_index([1, 2, 3], a_cache([1, 2, 3, 4]))
    assert index.propose(1).tokens == [4]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([1, -2, 3], [3], "token 1 is -2; give 0 or more"),
        ([1, 2, 3], [4, -1], "reply 1 has length -1; give 0 or more"),
        ([1, 2, 3], [2], "the lengths add up to 2 tokens but there are 3; give the length of each"),
        ([], [1], "the lengths add up to 1 tokens but there are 0; give the length of each"),
        ([1, 2], [MAX_TOKEN, MAX_TOKEN], "the lengths add up to 4294967294 tokens but there are 2"),
        ([[1, 2]], [2], "tokens and lengths must have one dimension each"),
    ],
)
def test_a_cache_of_nonsense_is_refused(
    tokens: list[int], lengths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LookupCache(np.array(tokens, np.int32), np.array(lengths, np.int32))


def test_a_cache_takes_no_numbers_that_a_cast_would_change() -> None:
    lengths = np.array([1], np.int32)
    for tokens in (np.array([2**32 + 1]), np.array([1.5])):
        with pytest.raises(TypeError):
            LookupCache(tokens, lengths)


def test_a_negative_token_is_refused_and_changes_nothing() -> None:
    index = an_index([1, 2])
    with pytest.raises(ValueError, match="token -1 is negative; give 0 or more"):
        index.extend([1, 2, -1])
    assert len(index) == 2


def test_what_a_sequence_lacks_of_the_tokens_is_appended_before_it_proposes() -> None:
    tokens = [1, 2, 3, 4, 1, 2]
    whole, grown = an_index(tokens), an_index(tokens[:3])
    assert grown.propose_behind(tokens, 3) == whole.propose(3)
    assert len(grown) == 6
    assert grown.propose_behind(tokens, 3).tokens == [3, 4, 1]


def test_tokens_that_do_not_continue_a_sequence_are_refused_and_change_nothing() -> None:
    index = an_index([1, 2])
    with pytest.raises(ValueError, match="tokens are 1 but the index knows 2 of them"):
        index.propose_behind([1], 8)
    with pytest.raises(ValueError, match="token -1 is negative; give 0 or more"):
        index.propose_behind([1, 2, 3, -1], 8)
    with pytest.raises(TypeError, match="tokens must be integers of 32 bits"):
        index.propose_behind([1, 2, "3"], 8)  # type: ignore[list-item]
    assert len(index) == 2
