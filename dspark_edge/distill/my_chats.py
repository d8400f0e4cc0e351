"""What the user wrote in his saved chats, as prompts: only when he asks for it, and only read.

Refuses to know what is done with the texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SessionError
from ..sessions import SessionStore


@dataclass(slots=True)
class Chats:
    """The user's turns, each text once. unread: why sessions were left out, a line each."""

    turns: list[str] = field(default_factory=list)
    n_sessions: int = 0
    unread: list[str] = field(default_factory=list)


def read_chats(store: SessionStore) -> Chats:
    """Of all sessions that can be read. Raises SessionError when their folder cannot be."""
    found: dict[str, None] = {}
    chats = Chats()
    for info in store.list():
        try:
            session = store.load(info.name).session
        except SessionError as error:
            chats.unread.append(str(error))
            continue
        chats.n_sessions += 1
        for message in session.messages:
            if message.get("role") == "user" and (text := _text(message)):
                found[text] = None
    chats.turns = list(found)
    return chats


def _text(message: Mapping[str, Any]) -> str:
    """What was typed; of a message in parts, its texts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content.strip() if isinstance(content, str) else ""
