"""A conversation to a saved session and back, in the terms of dspark_edge/sessions.py.

Refuses to know files and caches.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..engine import Engine
from ..sequence import SamplingParams
from ..session_file import Session
from ..sessions import SessionInfo, SessionStore
from .conversation import Conversation, conversation_of

MB = 1_000_000


@dataclass(slots=True)
class Kept:
    """What a session brings back. notices: what the user should know about it."""

    conversation: Conversation
    params: SamplingParams
    notices: list[str]


def save(
    name: str,
    conversation: Conversation,
    params: SamplingParams,
    *,
    seed: int | None,
    engine: Engine | None,
) -> list[str]:
    """Saves under a name; engine: with its caches, None: text only. Returns notices.

    Raises ValueError (the name) and SessionError.
    """
    session = Session(
        messages=conversation.messages,
        params=params,
        seed=seed,
        extra={"n_dropped": conversation.n_dropped},
    )
    return list(SessionStore().save(name, session, engine=engine))


def exists(name: str) -> bool:
    """Whether there is such a session. Raises ValueError (the name)."""
    return SessionStore().exists(name)


def load(name: str, engine: Engine) -> Kept:
    """A saved session. Raises ValueError (the name) and SessionError."""
    restored = SessionStore().load(name, engine=engine)
    session, notices = restored.session, list(restored.notices)
    if restored.n_cached:
        notices.append(f"{restored.n_cached} tokens are in the cache already")
    n_dropped = session.extra.get("n_dropped", 0)
    conversation = conversation_of(session.messages, n_dropped if type(n_dropped) is int else 0)
    return Kept(conversation, session.params, notices)


def listing() -> list[str]:
    """The saved sessions, newest first, a line each."""
    return [_line(info) for info in SessionStore().list()]


def names() -> list[str]:
    """Their names."""
    return [str(info.name) for info in SessionStore().list()]


def _line(info: SessionInfo) -> str:
    if info.error:
        return f"{info.name}: {info.error}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.saved_at))
    size = f"{info.n_bytes / MB:.1f} MB{' with caches' if info.has_kv else ''}"
    return f"{info.name}: {info.title} ({info.n_messages} messages, {when}, {size})"
