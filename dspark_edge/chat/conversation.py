"""A conversation as turns: what was asked, what was replied, and which turns are still sent.

Refuses to know models and terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Piece = tuple[bytes, bool]  # a token's bytes, and whether it was drafted and accepted


@dataclass(slots=True)
class Turn:
    """One message of the user with what followed it.

    thought: what the model thought first; it is never sent back. pieces: the reply's tokens, where
    it was made in this process. n_dropped: older turns that are not sent any more for its sake.
    """

    user: str
    replies: list[Message] = field(default_factory=list)
    thought: str = ""
    pieces: list[Piece] = field(default_factory=list)
    n_dropped: int = 0

    @property
    def reply(self) -> str:
        """The text of the reply."""
        return "".join(str(m.get("content") or "") for m in self.replies)

    @property
    def messages(self) -> list[Message]:
        """The turn as messages."""
        return [{"role": "user", "content": self.user}, *self.replies]


@dataclass(slots=True)
class Conversation:
    """All turns, the oldest first. n_dropped: of those, how many are not sent any more."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    n_dropped: int = 0

    @property
    def sent(self) -> list[Message]:
        """What the model is given."""
        return self._messages(self.turns[self.n_dropped :])

    @property
    def messages(self) -> list[Message]:
        """Everything, dropped turns included."""
        return self._messages(self.turns)

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message for turn in turns for message in turn.messages]

    def undo(self) -> Turn | None:
        """Takes the last turn back and returns it; None when there is none.

        What was dropped for its sake is sent again.
        """
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.n_dropped = min(self.n_dropped - turn.n_dropped, max(len(self.turns) - 1, 0))
        return turn

    def make_room(self, fits: Callable[[list[Message]], bool]) -> int:
        """Drops the oldest turns, whole, until what is sent fits or only the last turn is left.

        Returns how many went.
        """
        n_before = self.n_dropped
        while self.n_dropped < len(self.turns) - 1 and not fits(self.sent):
            self.n_dropped += 1
            self.turns[-1].n_dropped += 1
        return self.n_dropped - n_before


def conversation_of(messages: Sequence[Message], n_dropped: int = 0) -> Conversation:
    """The conversation that some messages make: system messages first, then turns."""
    conversation = Conversation()
    for message in messages:
        role, content = message.get("role"), str(message.get("content") or "")
        if role == "user":
            conversation.turns.append(Turn(content))
        elif conversation.turns:
            conversation.turns[-1].replies.append(dict(message))
        elif role == "system":
            conversation.system = "\n\n".join(filter(None, (conversation.system, content)))
        else:
            conversation.turns.append(Turn("", [dict(message)]))
    conversation.n_dropped = min(max(n_dropped, 0), max(len(conversation.turns) - 1, 0))
    return conversation
