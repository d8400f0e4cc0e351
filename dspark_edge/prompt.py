"""The model's chat template: messages to the text that the model was trained to see.

Owns: checking messages and rendering them. Templates are jinja2, run in llama-cpp-python's sandbox.
Refuses to know: tokens, models and conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from .errors import ModelError


class ChatTemplate:
    """One chat template, ready to render."""

    __slots__ = ("_with_reply_opened", "_without")

    def __init__(self, template: str, *, bos: str, eos: str) -> None:
        """template: jinja2 text. bos, eos: text of the model's begin and end tokens.

        Raises ModelError when the template is empty or does not compile.
        """
        if not template.strip():
            raise ModelError("model has no chat template; pass plain prompts to generate()")
        try:
            self._with_reply_opened = Jinja2ChatFormatter(template, eos, bos, True)
            self._without = Jinja2ChatFormatter(template, eos, bos, False)
        except Exception as error:  # jinja2 lets several kinds through: a template is a program
            raise ModelError(
                f"chat template does not compile ({_one_line(error)}); "
                "pass plain prompts to generate()"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text; with add_generation_prompt it ends where the model's reply begins.

        messages: non-empty list of {"role": str, "content": str}, more keys allowed.
        Raises ValueError when they are not, or when the template refuses them.
        """
        checked = _checked(messages)
        formatter = self._with_reply_opened if add_generation_prompt else self._without
        try:
            return formatter(messages=checked).prompt
        except Exception as error:  # whatever the template raises, the messages are at fault
            raise ValueError(f"chat template refuses these messages: {_one_line(error)}") from error


def _checked(messages: Sequence[Mapping[str, object]]) -> list[Any]:
    """The messages as plain dicts; the formatter's own type is a closed union of TypedDicts."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages is a {type(messages).__name__}; "
            'pass a list of {"role": ..., "content": ...}'
        )
    if not messages:
        raise ValueError('messages is empty; pass at least one {"role": ..., "content": ...}')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f'message {i} is a {type(message).__name__}; pass {{"role": ..., "content": ...}}'
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f'message {i} has no "{key}" text; got {message.get(key)!r:.80}')
    return [dict(message) for message in messages]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
