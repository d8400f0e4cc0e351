"""One reply: its chunks split into thought and text, shown as they come, and added up.

Goes on in a fresh request where the context fills up and its caller makes room. Refuses to know
turns and commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..engine import Engine
from ..sequence import FinishReason, SamplingParams, Stats
from ..text import TextStream
from ..thoughts import THINK, THINK_END, ThoughtSplitter
from .conversation import Piece
from .markdown import MarkdownStyler
from .screen import Screen

SUMMED = (
    *("n_tokens", "n_rounds", "n_drafted", "n_verified", "n_accepted"),
    *("prefill_s", "decode_s", "own_s"),
)


@dataclass(slots=True)
class Reply:
    """What came of a prompt. finish_reason: None when Ctrl-C stopped it. parts: the statistics of
    its requests, of which there is one unless the context filled up. notices: what was said beside
    it."""

    text: str = ""
    thought: str = ""
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    parts: list[Stats] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def stats(self) -> Stats | None:
        """All of it; None when it was stopped before its first token."""
        if not self.parts:
            return None
        sums = {name: sum(getattr(part, name) for part in self.parts) for name in SUMMED}
        margin = min(part.min_margin for part in self.parts)
        state = self.parts[-1].speculation
        return replace(self.parts[0], **sums, min_margin=margin, speculation=state)

    @property
    def n_held(self) -> int:
        """Tokens of the context that are taken now."""
        return self.parts[-1].n_prompt + self.parts[-1].n_tokens if self.parts else 0


class View(Protocol):
    """What shows a reply while it comes."""

    def show(self, thought: str, content: str, *, is_last: bool) -> None:
        """More of the thought, then more of the text."""


class SilentView:
    """Shows nothing."""

    def show(self, thought: str, content: str, *, is_last: bool) -> None:
        """Nothing."""


class ScreenView:
    """Shows a reply on the screen: thoughts dimmed, or left out, and the text as light markdown."""

    __slots__ = ("_is_in_thought", "_markdown", "_screen", "_shows_thoughts")

    def __init__(self, screen: Screen, *, shows_thoughts: bool) -> None:
        self._screen = screen
        self._shows_thoughts = shows_thoughts
        self._markdown = MarkdownStyler() if screen.shows_style else None
        self._is_in_thought = False

    def show(self, thought: str, content: str, *, is_last: bool) -> None:
        """More of the thought, then more of the text."""
        if thought and self._shows_thoughts:
            begin = "" if self._is_in_thought else f"{THINK}\n"
            self._is_in_thought = True
            self._screen.reply(begin + thought, "dim")
        if self._is_in_thought and (content or is_last):
            self._is_in_thought = False
            # What was cut off inside of its thought has no end mark.
            self._screen.reply(f"\n{THINK_END}\n\n" if content else "\n", "dim")
        if self._markdown is not None:
            for text, style in self._markdown.push(content, is_last=is_last):
                self._screen.reply(text, style)
        elif content:
            self._screen.reply(content)


def make_reply(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    *,
    view: View,
    is_thinking: bool,
    more_room: Callable[[int], list[int] | None],
) -> Reply:
    """Streams a reply to a prompt; Ctrl-C ends it, and what was said so far stays.

    is_thinking: whether the prompt has begun a thought. more_room: called when the context is full,
    with the number of tokens replied; gives a shorter prompt to go on behind, or None.
    """
    reply, splitter = Reply(), ThoughtSplitter(is_thinking)
    # Of all requests: a full context may cut a character or a stop string in two.
    stream = TextStream(params.stop)

    def add(text: str, *, is_last: bool = False) -> None:
        thought, content = splitter.push(text, is_last)
        reply.thought += thought
        reply.text += content
        view.show(thought, content, is_last=is_last)

    try:
        shorter: list[int] | None = prompt
        while shorter is not None:
            for text in _request(engine, shorter, params, reply, stream):
                add(text)
            is_full = reply.finish_reason == "context_full"
            shorter = more_room(len(reply.token_ids)) if is_full else None
        rest = stream.flush()
    except KeyboardInterrupt:
        reply.finish_reason, rest = None, ""
    add(rest, is_last=True)
    return reply


def _request(
    engine: Engine, prompt: list[int], params: SamplingParams, reply: Reply, text: TextStream
) -> Iterator[str]:
    """Runs one request behind what was replied so far, and yields what `text` makes of it."""
    if reply.parts:
        limit = params.max_tokens
        left = None if limit is None else limit - len(reply.token_ids)
        params = replace(params, seed=reply.parts[0].seed, max_tokens=left)
    stream = engine.generate([*prompt, *reply.token_ids], params)
    is_first = True
    try:
        for chunk in stream:
            if is_first:
                reply.parts.append(chunk.stats)
                is_first = False
            drafted = [n < chunk.n_accepted for n in range(len(chunk.token_ids))]
            reply.pieces += zip(map(engine.token_bytes, chunk.token_ids), drafted, strict=True)
            reply.token_ids += chunk.token_ids
            reply.finish_reason = chunk.finish_reason
            shown = [t for t in chunk.token_ids if params.ignore_eos or not engine.is_end(t)]
            yield "".join([text.push(engine.token_bytes(token)) for token in shown])
            if text.stopped:  # maybe by a stop string that the request before has begun
                reply.finish_reason = "stop"
                break
    finally:
        stream.close()  # aborts the request when it has not ended
