"""A reply's text, piece by piece, split into the model's thought and what it says.

A thought stands between <think> and </think> at the beginning. What is pushed comes out once, in
order, however the text is cut into pieces. Refuses to know who shows it.
"""

from __future__ import annotations

THINK, THINK_END = "<think>", "</think>"


class ThoughtSplitter:
    """Splits one reply, which is before its thought, inside of it, or past it."""

    __slots__ = ("_held", "_skips_blanks", "_state")

    def __init__(self, is_thinking: bool) -> None:
        """is_thinking: whether the prompt has begun the thought already."""
        self._state = "inside" if is_thinking else "before"
        self._held = ""
        self._skips_blanks = is_thinking

    def push(self, text: str, is_last: bool) -> tuple[str, str]:
        """What the text adds, as (thought, content); is_last: nothing is held back any more."""
        reasoning = content = ""
        text, self._held = self._held + text, ""
        if self._state == "before":
            begun = text.lstrip()
            if begun.startswith(THINK):
                text, self._state, self._skips_blanks = begun[len(THINK) :], "inside", True
            elif THINK.startswith(begun) and not is_last:
                self._held = text
                return "", ""
            else:
                self._state = "past"
        if self._state == "inside":
            text = self._without_blanks(text)
            thought, mark, rest = text.partition(THINK_END)
            if mark:
                reasoning, text = thought.rstrip("\n"), rest
                self._state, self._skips_blanks = "past", True
            else:
                n_held = 0 if is_last else held_back(thought, THINK_END)
                # Blank lines before the mark are no part of the thought.
                end = len(thought) - n_held
                end = len(thought[:end].rstrip("\n")) if not is_last else end
                reasoning, self._held, text = thought[:end], thought[end:], ""
        if self._state == "past":
            content = self._without_blanks(text)
        return reasoning, content

    def _without_blanks(self, text: str) -> str:
        if not self._skips_blanks:
            return text
        text = text.lstrip("\n")
        self._skips_blanks = not text
        return text


def held_back(text: str, mark: str) -> int:
    """Number of last characters that may be the beginning of the mark."""
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-n:]):
            return n
    return 0
