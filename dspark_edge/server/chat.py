"""/v1/chat/completions: a conversation to a prompt, and pieces of text to OpenAI's messages.

Refuses to know the engine's thread and HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .answer import Asked, Plan
from .errors import refused
from .figures import Extras, Usage, check_prompt, token_logprobs
from .hub import Served
from .jobs import Piece
from .json_schema import grammar_of
from .params import choices_of, sampling_of
from .prompts import PromptTemplate, Rendered
from .reply import Delta, ReplySplitter
from .schemas import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedTool, Tool
from .settings import Limits
from .tools import after_thought, call_grammar

FINISH = {"stop": "stop", "length": "length", "context_full": "length", "abort": "stop"}


def asked_of(body: ChatRequest, limits: Limits) -> Asked:
    """What a chat request wants. Raises ApiError for what can be told without the model."""
    n = body.n or 1
    if n > limits.n_choices:
        raise refused("n", f"{n} choices are too many; the limit is {limits.n_choices}")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "it means something only with stream")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "it needs logprobs: true")
    return Asked(
        model=body.model,
        n_jobs=n,
        streams=bool(body.stream),
        user=body.user,
        plan=lambda served: _plan(body, limits, served),
    )


def _plan(body: ChatRequest, limits: Limits, served: Served) -> Plan:
    template = served.text.need_template()
    tools = _tools_of(body, limits)
    rendered = template.render(
        body.messages,
        tools=() if body.tool_choice == "none" else tools,
        variables=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )
    tokens = check_prompt(rendered.text, served, limits, add_special=False, name="messages")
    params = sampling_of(
        body,
        limits,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body, tools, template, rendered, limits),
    )
    reply = ChatReply(body, served, template, rendered, tools)
    return Plan([(tokens, each) for each in choices_of(params, body.n or 1)], reply)


def _max_tokens(body: ChatRequest) -> int | None:
    both = {n for n in (body.max_tokens, body.max_completion_tokens) if n is not None}
    if len(both) > 1:
        raise refused("max_tokens", "max_completion_tokens says something else; give one of them")
    return next(iter(both), None)


def _tools_of(body: ChatRequest, limits: Limits) -> list[Tool]:
    tools = body.tools or []
    if len(tools) > limits.n_tools:
        raise refused("tools", f"there are {len(tools)}; the limit is {limits.n_tools}")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise refused("tools", "two have the same name")
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise refused("tool_choice", "there are no tools to choose from")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise refused("tool_choice", f"{body.tool_choice.function.name!r:.80} is none of the tools")
    return tools


def _grammar(
    body: ChatRequest,
    tools: list[Tool],
    template: PromptTemplate,
    rendered: Rendered,
    limits: Limits,
) -> str | None:
    grammar = _tool_grammar(body, tools, template, limits)
    shape = _format_grammar(body, limits)
    if grammar is not None and shape is not None:
        raise refused("response_format", "tool_choice already shapes the reply")
    if shape is not None and tools and body.tool_choice != "none":
        raise refused("response_format", 'tools may be called; add tool_choice: "none"')
    grammar = grammar or shape
    if grammar is None or not template.thinks:
        return grammar
    return after_thought(grammar, is_thinking=rendered.is_thinking)


def _tool_grammar(
    body: ChatRequest, tools: list[Tool], template: PromptTemplate, limits: Limits
) -> str | None:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return None
    parallel = body.parallel_tool_calls is not False and choice == "required"
    return call_grammar(tools, template.tool_style, parallel=parallel, limits=limits)


def _format_grammar(body: ChatRequest, limits: Limits) -> str | None:
    shape = body.response_format
    if isinstance(shape, JsonObjectFormat):
        schema: dict[str, Any] = {"type": "object"}
    elif isinstance(shape, JsonSchemaFormat):
        schema = shape.json_schema.schema_
    else:
        return None
    return grammar_of([schema], lambda schemas: schemas[0], "response_format", limits)


@dataclass(slots=True)
class _Choice:
    """One of the n replies, as far as it has come."""

    splitter: ReplySplitter
    extras: Extras
    said: Delta = field(default_factory=Delta)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    n_told: int = 0  # logprobs that a stream has told
    finish_reason: str | None = None
    has_begun: bool = False


class ChatReply:
    """The choices of one chat completion."""

    def __init__(
        self,
        body: ChatRequest,
        served: Served,
        template: PromptTemplate,
        rendered: Rendered,
        tools: list[Tool],
    ) -> None:
        names = frozenset(tool.function.name for tool in tools)
        if body.tool_choice == "none":
            names = frozenset()
        self._vocabulary = served.text.vocabulary
        self._wants_logprobs = bool(body.logprobs)
        self._one_call = body.parallel_tool_calls is False
        options = body.stream_options
        self._usage = Usage(
            "chat.completion",
            served.entry.id,
            n_per_prompt=body.n or 1,
            tells=bool(options and options.include_usage),
        )
        tells_pieces = bool(options and options.include_pieces)
        self._choices = [
            _Choice(
                ReplySplitter(
                    thinks=template.thinks,
                    is_thinking=rendered.is_thinking,
                    style=template.tool_style,
                    names=names,
                ),
                Extras(self._vocabulary if tells_pieces else None),
            )
            for _ in range(body.n or 1)
        ]

    def is_over(self, index: int) -> bool:
        """Whether the rest of this choice is not wanted: one call was, and it is there."""
        return self._choices[index].finish_reason is not None

    def push(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The stream's event for a piece; None when there is nothing to say of it yet."""
        choice = self._choices[index]
        self._usage.add(index, piece)
        choice.extras.add(piece)
        if self._wants_logprobs:
            choice.logprobs += token_logprobs(piece.logprobs, self._vocabulary)
        delta = choice.splitter.push(piece.text, is_last=piece.finish_reason is not None)
        if self._one_call:
            delta.calls = delta.calls[: 1 - len(choice.said.calls)]
        n_calls = len(choice.said.calls)
        choice.said.reasoning += delta.reasoning
        choice.said.content += delta.content
        choice.said.calls += delta.calls
        has_calls = bool(choice.said.calls)
        if piece.finish_reason is not None:
            # A call that was cut short is no call.
            reason = FINISH.get(piece.finish_reason, "stop")
            choice.finish_reason = "tool_calls" if has_calls and reason == "stop" else reason
        elif has_calls and self._one_call:
            choice.finish_reason = "tool_calls"
        if not delta and choice.finish_reason is None:
            return None
        return self._event(index, choice, delta, n_calls, piece)

    def _event(
        self, index: int, choice: _Choice, delta: Delta, n_calls: int, piece: Piece
    ) -> dict[str, Any]:
        said: dict[str, Any] = {} if choice.has_begun else {"role": "assistant"}
        choice.has_begun = True
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.calls:
            said["tool_calls"] = [
                call.to_json(n) for n, call in enumerate(delta.calls, start=n_calls)
            ]
        told: dict[str, Any] = {"index": index, "delta": said}
        told["finish_reason"] = choice.finish_reason
        if self._wants_logprobs:
            told["logprobs"] = {"content": choice.logprobs[choice.n_told :]}
            choice.n_told = len(choice.logprobs)
        is_last = choice.finish_reason is not None
        return self._usage.event([told], choice.extras.tell(piece, is_last=is_last))

    def last_events(self) -> list[dict[str, Any]]:
        """What a stream says when all choices have ended."""
        return self._usage.last_events()

    def whole(self) -> dict[str, Any]:
        """The reply as one object."""
        return self._usage.whole(
            [self._message(i, choice) for i, choice in enumerate(self._choices)]
        )

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        said = choice.said
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [call.to_json() for call in said.calls]
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        return {
            "index": index,
            "message": message,
            "finish_reason": choice.finish_reason,
            "logprobs": {"content": choice.logprobs} if self._wants_logprobs else None,
        }
