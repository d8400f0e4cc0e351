"""Lines that must fit so many rows: which are shortened, and what is left of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dspark_edge.chat.folding import fitted

COLUMNS = 10


def n_rows_of(line: str) -> int:
    return -(-len(line) // COLUMNS) or 1


def fit(lines: Sequence[str], most_rows: int) -> list[str]:
    return fitted(lines, most_rows=most_rows, columns=COLUMNS, n_rows_of=n_rows_of)


def test_lines_that_fit_stay_as_they_are() -> None:
    assert fit(["a" * 20, "b"], 3) == ["a" * 20, "b"]


def test_a_line_that_is_too_long_keeps_its_beginning_and_its_end() -> None:
    assert fit(["0123456789-0123456789-0123456789"], 2) == ["0123456789…123456789"]
    assert fit(["0123456789-0123456789-0123456789"], 1) == ["01234…6789"]


def test_the_longest_is_shortened_and_of_equals_the_first() -> None:
    assert fit(["a" * 15, "b" * 15, "c"], 4) == ["aaaaa…aaaa", "b" * 15, "c"]
    assert fit(["a" * 15, "b" * 25, "c"], 5) == ["a" * 15, "b" * 10 + "…" + "b" * 9, "c"]


@given(st.lists(st.text("ab ", max_size=80), max_size=6), st.integers(1, 8))
def test_rows_are_never_more_than_allowed_or_one_a_line(lines: list[str], most_rows: int) -> None:
    shown = fit(lines, most_rows)
    assert sum(map(n_rows_of, shown)) <= max(most_rows, len(lines))
    assert len(shown) == len(lines)
