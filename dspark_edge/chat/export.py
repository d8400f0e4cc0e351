"""A conversation as a file for people (Markdown) or programs (JSON).

Refuses to know sessions: what is exported is not read back.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..files import write_atomically
from .conversation import Conversation


def export(conversation: Conversation, path: Path) -> None:
    """Writes the whole file: JSON for a name that ends so, Markdown for any other.

    Raises OSError when the place cannot be written.
    """
    as_json = path.suffix.lower() == ".json"
    text = _json(conversation) if as_json else _markdown(conversation)
    if not write_atomically(path, text):
        raise OSError(f"{path} cannot be written; check the folder and the room on the disk")


def _json(conversation: Conversation) -> str:
    return json.dumps({"messages": conversation.messages}, ensure_ascii=False, indent=2) + "\n"


def _markdown(conversation: Conversation) -> str:
    parts = [f"## System\n\n{conversation.system}"] if conversation.system else []
    for turn in conversation.turns:
        parts.append(f"## User\n\n{turn.user}")
        if turn.replies:
            parts.append(f"## Assistant\n\n{turn.reply}")
    return "\n\n".join(parts) + "\n"
