"""A reply's text, piece by piece, split into thought, content and tool calls.

What is pushed comes out once, in order, however the text is cut into pieces. Refuses to know HTTP
and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..thoughts import ThoughtSplitter, held_back
from .prompts import ToolStyle
from .tools import CALL, CALL_END, Call, parse_bare_calls, parse_call


@dataclass(slots=True)
class Delta:
    """What a piece of text adds to a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ReplySplitter:
    """Splits one reply."""

    __slots__ = ("_calls", "_thought")

    def __init__(
        self, *, thinks: bool, is_thinking: bool, style: ToolStyle, names: frozenset[str]
    ) -> None:
        """thinks: whether a thought may come. is_thinking: whether the prompt has begun one.
        names: tools that may be called."""
        self._thought = ThoughtSplitter(is_thinking) if thinks else None
        self._calls = _Calls(style, names) if names else None

    def push(self, text: str, *, is_last: bool = False) -> Delta:
        """What the text adds; with is_last also everything that was held back."""
        delta = Delta(content=text)
        if self._thought is not None:
            delta.reasoning, delta.content = self._thought.push(text, is_last)
        if self._calls is not None:
            delta.content, delta.calls = self._calls.push(delta.content, is_last)
        return delta


class _Calls:
    """Text with calls in it, in one of the two forms."""

    __slots__ = ("_has_called", "_held", "_is_bare", "_names", "_style")

    def __init__(self, style: ToolStyle, names: frozenset[str]) -> None:
        self._style = style
        self._names = names
        self._held = ""
        self._has_called = False
        self._is_bare: bool | None = None  # whether a reply in Llama's form is a call at all

    def push(self, text: str, is_last: bool) -> tuple[str, list[Call]]:
        """(content, calls)"""
        self._held += text
        if self._style == "llama":
            return self._push_bare(is_last)
        content: list[str] = []
        calls: list[Call] = []
        while True:
            before, mark, inside = self._held.partition(CALL)
            if not mark:
                n_held = 0 if is_last else held_back(before, CALL)
                content.append(before[: len(before) - n_held])
                self._held = before[len(before) - n_held :]
                break
            body, end, rest = inside.partition(CALL_END)
            if not end and not is_last:
                content.append(before)
                self._held = mark + inside
                break
            call = parse_call(body, self._names)
            # What is no call of a known tool stays text: nothing is lost.
            content.append(before if call else before + mark + body + end)
            calls += [call] if call else []
            self._held = rest
        self._has_called = self._has_called or bool(calls)
        shown = "".join(content)
        # Line ends around calls are no content.
        is_blank = self._has_called and not shown.strip("\n")
        return "" if is_blank else shown, calls

    def _push_bare(self, is_last: bool) -> tuple[str, list[Call]]:
        begun = self._held.lstrip()
        if self._is_bare is None and begun:
            self._is_bare = begun[0] in "{<"
        if self._is_bare is False or is_last:
            text, self._held = self._held, ""
            calls = parse_bare_calls(text, self._names) if self._is_bare else []
            return ("", calls) if calls else (text, [])
        return "", []
