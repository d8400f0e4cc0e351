"""Conversations with tools to prompt text, by the model's own chat template.

Owns what a template is given beside the messages, and what it says about the model: whether it
thinks, and in which form it calls tools. Refuses to know tokens and replies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from ..errors import ModelError
from ..thoughts import THINK, THINK_END
from .errors import ApiError, refused
from .schemas import Message, Tool

ToolStyle = Literal["hermes", "llama", "none"]
OWN_VARIABLES = frozenset(
    (
        *("messages", "tools", "tool_choice", "functions", "function_call"),
        *("bos_token", "eos_token", "add_generation_prompt", "raise_exception", "strftime_now"),
    )
)


@dataclass(slots=True, frozen=True)
class Rendered:
    """A prompt's text, and whether it ends inside of the model's thoughts."""

    text: str
    is_thinking: bool


class PromptTemplate:
    """One chat template with what goes around it."""

    __slots__ = ("_formatter", "_text", "thinks", "tool_style")

    def __init__(self, template: str, *, begin: str, end: str) -> None:
        """begin, end: the model's begin and end tokens, written out.

        Raises ModelError when the template is empty or does not compile.
        """
        if not template.strip():
            raise ModelError("model has no chat template; use /v1/completions")
        try:
            self._formatter = Jinja2ChatFormatter(template, end, begin, True)
        except Exception as error:  # a template is a program
            raise ModelError(f"chat template does not compile ({_one_line(error)})") from error
        self._text = template
        self.thinks = THINK_END in template or "enable_thinking" in template
        self.tool_style: ToolStyle = _tool_style(template)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
        reasoning_effort: str | None = None,
    ) -> Rendered:
        """The prompt up to where the reply begins.

        variables: chat_template_kwargs. Raises ApiError for what the template does not know, and
        for messages that it refuses.
        """
        extra = self._variables(variables or {}, reasoning_effort)
        if tools and self.tool_style == "none":
            raise refused("tools", "this model's chat template has no place for tools")
        plain_tools = [tool.model_dump(exclude_none=True) for tool in tools] or None
        plain: list[Any] = [_plain(message, i) for i, message in enumerate(messages)]
        # The formatter's own types are closed unions of TypedDicts.
        given: dict[str, Any] = {"messages": plain, "tools": plain_tools, **extra}
        try:
            text = self._formatter(**given).prompt
        except Exception as error:  # whatever the template raises, the messages are at fault
            raise ApiError(
                400, f"the chat template refuses these messages: {_one_line(error)}",
                param="messages",
            ) from error  # fmt: skip
        return Rendered(text, self.thinks and text.rstrip().endswith(THINK))

    def _variables(
        self, variables: Mapping[str, object], reasoning_effort: str | None
    ) -> dict[str, object]:
        for name in variables:
            if name in OWN_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", self._text):
                raise refused(
                    "chat_template_kwargs", f"{name!r:.60} is no variable of this chat template"
                )
        extra = dict(variables)
        if reasoning_effort is None:
            return extra
        if "reasoning_effort" in self._text:
            return extra | {"reasoning_effort": reasoning_effort}
        if "enable_thinking" in self._text:
            return extra | {"enable_thinking": reasoning_effort not in ("none", "minimal")}
        if reasoning_effort == "none" and not self.thinks:
            return extra
        raise refused("reasoning_effort", "this model's chat template has no such switch")


def _tool_style(template: str) -> ToolStyle:
    if "tools" not in template:
        return "none"
    if "<tool_call>" in template:
        return "hermes"
    if "ipython" in template or '"parameters"' in template:
        return "llama"
    return "none"


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates know it: one text, and arguments of calls as objects.

    index: of the message, for errors. Raises ApiError.
    """
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    content = plain.get("content", "")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    plain["content"] = content
    for i, call in enumerate(plain.get("tool_calls", ())):
        given = call["function"]["arguments"]
        try:
            # Clients send "" for a call without arguments.
            call["function"]["arguments"] = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            place = f"messages[{index}].tool_calls[{i}].function.arguments"
            raise ApiError(
                400,
                f"{place} is {given!r:.60}, which is no JSON; send an object as JSON text: {{}}",
                param="messages",
            ) from error
    return plain


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
