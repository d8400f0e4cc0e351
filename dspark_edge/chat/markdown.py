"""Light markdown on a stream: adds styles to a text and never takes or adds a character.

So code can be copied as it was written, and a guess gone wrong costs a colour only. Knows fences,
code spans, bold, headings and list marks, and nothing inside of code. Refuses to know terminals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Styled = tuple[str, str]  # text, style

CODE, MARK, BOLD, HEADING = "cyan", "dim", "bold", "bold underline"
_UNDECIDED = re.compile(r" {0,3}(`{0,2}|~{0,2}|#{1,6}|[-*+]|\d{1,3}[.)]?)?")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MAYBE_FENCE = re.compile(r" {0,3}(`*|~*)[ \t]*")
_LIST_MARK = re.compile(r" *([-*+]|\d{1,3}[.)])[ \t]")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]")


class MarkdownStyler:
    """Styles one text. What is pushed comes out in order, cut into (text, style)."""

    __slots__ = ("_fence", "_held", "_line_style", "_span", "_starts_line")

    def __init__(self) -> None:
        self._held = ""  # what may still turn out to be a mark
        self._starts_line = True
        self._fence = ""  # the marks that opened the code block, while inside of one
        self._line_style = ""
        self._span = ""  # the mark that opened a code span or bold, until the line ends

    def push(self, text: str, *, is_last: bool = False) -> list[Styled]:
        """The text that can be shown by now; with is_last all that was held back."""
        text, self._held = self._held + text, ""
        shown: list[Styled] = []
        lines = text.splitlines(keepends=True)
        for line in lines:
            if self._starts_line and not line.endswith("\n") and not is_last:
                undecided = _MAYBE_FENCE if self._fence else _UNDECIDED
                if undecided.fullmatch(line):
                    self._held = line
                    break
            shown += self._begin(line, is_last) if self._starts_line else self._go_on(line, is_last)
        return shown

    def _begin(self, line: str, is_last: bool) -> list[Styled]:
        """A line from its beginning on."""
        self._starts_line = False
        self._line_style = self._span = ""
        found = _FENCE.match(line)
        if self._fence:
            closes = found and found[1].startswith(self._fence) and not line[found.end() :].strip()
            if closes:
                self._fence = ""
            self._line_style = MARK if closes else CODE
        elif found and not (found[1][0] == "`" and "`" in line[found.end() :]):
            self._fence = found[1]
            self._line_style = MARK
        elif _HEADING.match(line):
            self._line_style = HEADING
        elif mark := _LIST_MARK.match(line):
            return [(mark[0], BOLD), *self._go_on(line[mark.end() :], is_last)]
        return self._go_on(line, is_last)

    def _go_on(self, text: str, is_last: bool) -> list[Styled]:
        """More of a line whose beginning is known."""
        ends = text.endswith("\n")
        self._starts_line = ends
        if self._line_style:
            return [(text, self._line_style)]
        if not ends and not is_last:
            # A run of marks at the end may go on.
            end = len(text.rstrip("`*"))
            text, self._held = text[:end], text[end:]
        return list(self._spans(text))

    def _spans(self, text: str) -> Iterator[Styled]:
        begin = 0
        for found in re.finditer(r"`+|\*\*|\n", text):
            mark = found[0]
            if mark == "\n":
                yield text[begin : found.start()], self._span_style
                yield mark, ""
                self._span, begin = "", found.end()
            elif not self._span and _opens(text, found.end()):
                yield text[begin : found.start()], ""
                self._span, begin = mark, found.start()
            elif self._span == mark:
                yield text[begin : found.end()], self._span_style
                self._span, begin = "", found.end()
        yield text[begin:], self._span_style

    @property
    def _span_style(self) -> str:
        return BOLD if self._span == "**" else CODE if self._span else ""


def _opens(text: str, end: int) -> bool:
    """Whether a mark that ends there can open a span: a blank behind it says no."""
    return end == len(text) or not text[end].isspace()
