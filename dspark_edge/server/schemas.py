"""Requests as they arrive: OpenAI's fields, and this engine's own beside them.

Owns names, types and ranges: a field that is not listed is refused by name (strict.py). What a
field means is known elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..sequence import MAX_COUNT, MAX_SEED
from .strict import Biases, Count, Items, Penalty, Probability, Strict, TokenId, Variables

MAX_MESSAGE_KEYS = 64  # chat templates get them all


class TextPart(Strict):
    """The one kind of content part that a text model can read."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What an earlier reply called. arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """One call of an earlier reply."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(BaseModel):
    """One message; keys beyond these go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    content: Annotated[str | Items[TextPart] | None, Field(validate_default=True)] = None

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > MAX_MESSAGE_KEYS:
            raise PydanticCustomError(
                "invalid_value",
                "the message has {n} keys; the limit is {limit}",
                {"n": len(given), "limit": MAX_MESSAGE_KEYS},
            )
        return given

    @field_validator("content", mode="before")
    @classmethod
    def _has_only_text(cls, content: object) -> object:
        parts = content if isinstance(content, list) else ()
        for i, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise PydanticCustomError(
                    "unsupported_content",
                    "part {number} is of type {kind}, and only text can be read here; leave it out",
                    {"number": i, "kind": repr(kind)[:40]},
                )
        return content

    @field_validator("content", mode="after")
    @classmethod
    def _is_there(
        cls, content: str | Items[TextPart] | None, info: ValidationInfo
    ) -> str | Items[TextPart] | None:
        if content or isinstance(content, str) or info.data.get("tool_calls"):
            return content
        raise PydanticCustomError(
            "missing_required_parameter",
            "it is {what}; only an assistant's message with tool_calls may go without",
            {"what": "missing" if content is None else "an empty list"},
        )


class Function(Strict):
    """A tool's function. parameters: a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of one of the tools."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A named JSON schema; it is enforced whether strict or not."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StreamOptions(Strict):
    """include_usage: a last event with the token counts. include_pieces: token texts in x_dspark,
    each with whether it was drafted."""

    include_usage: bool | None = None
    include_pieces: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Strict):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: str | Items[str] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    min_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] | None = None
    penalty_last_n: Count | None = None
    penalize_prompt: bool | None = None
    logit_bias: Biases = None
    ignore_eos: bool | None = None
    user: str | None = None  # a label for the log


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: (
        Annotated[
            TextFormat | JsonObjectFormat | JsonSchemaFormat,
            Field(discriminator="type"),
        ]
        | None
    ) = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: Variables = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Items[Literal["text"]] | None = None


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None


class TokenizeRequest(Strict):
    """The body of POST /tokenize. add_special: put the model's begin token in front."""

    content: str
    add_special: bool = False
    model: str | None = None


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    tokens: Items[TokenId]
    model: str | None = None


class TemplateRequest(Strict):
    """The body of POST /apply-template."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    tools: Items[Tool] | None = None
    chat_template_kwargs: Variables = None
    model: str | None = None
