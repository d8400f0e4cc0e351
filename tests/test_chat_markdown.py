"""The chat's light markdown: styles come on, characters stay as they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dspark_edge.chat.markdown import BOLD, CODE, HEADING, MarkdownStyler

MARKS = st.lists(st.sampled_from(["`", "```", "~~~", "**", "*", "# ", "- ", "1. ", " ", "\n", "a"]))


def styled(text: str, cuts: int = 1) -> list[tuple[str, str]]:
    """Each character with its style, the text being pushed `cuts` characters at a time."""
    styler = MarkdownStyler()
    parts = [text[i : i + cuts] for i in range(0, len(text), cuts)]
    shown = [piece for part in parts for piece in styler.push(part)]
    shown += styler.push("", is_last=True)
    return [(char, style) for piece, style in shown for char in piece]


def style_of(text: str, word: str) -> str:
    """The style of a word's first character."""
    return styled(text)[text.index(word)][1]


@given(MARKS, st.integers(1, 5))
def test_no_character_is_added_taken_or_moved(marks: list[str], cuts: int) -> None:
    text = "".join(marks)
    assert "".join(char for char, _ in styled(text, cuts)) == text


def test_code_has_one_style_whatever_looks_like_markdown_in_it() -> None:
    text = "```py\n# no heading\nx = 2**3**2 `y`\n- z\n```\nafter"
    for word in ("# no", "x = 2", "**3", "`y`", "- z"):
        assert style_of(text, word) == CODE
    assert style_of(text, "after") == ""


def test_headings_bold_and_code_spans_are_styled() -> None:
    assert style_of("# Title\n", "Title") == HEADING
    assert style_of("a **word** b", "word") == BOLD
    assert style_of("a **word** b", "b") == ""
    assert style_of("a `x*y` b", "x") == CODE


def test_a_mark_that_nothing_closes_ends_with_its_line() -> None:
    assert style_of("a `b c\nd", "d") == ""
