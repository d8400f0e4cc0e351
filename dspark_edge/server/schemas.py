"""Requests as they arrive: OpenAI's fields, and this engine's own beside them.

Owns names, types and ranges: a field that is not listed is refused by name. What a field means is
known elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..sequence import MAX_COUNT, MAX_SEED

Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """The one kind of content part that a text model can read."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """What an earlier reply called. arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """One call of an earlier reply."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(BaseModel):
    """One message; keys beyond these go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(_Strict):
    """A tool's function. parameters: a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(_Strict):
    """The name of one of the tools."""

    name: str


class NamedTool(_Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(_Strict):
    """A named JSON schema; it is enforced whether strict or not."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StreamOptions(_Strict):
    """include_usage: a last event with the token counts. include_pieces: token texts in x_dspark,
    each with whether it was drafted."""

    include_usage: bool | None = None
    include_pieces: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(_Strict):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    min_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] | None = None
    penalty_last_n: Count | None = None
    logit_bias: (
        dict[str, Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]] | None
    ) = None
    ignore_eos: bool | None = None
    user: str | None = None  # a label for the log


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
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
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None


class TokenizeRequest(_Strict):
    """The body of POST /tokenize. add_special: put the model's begin token in front."""

    content: str
    add_special: bool = False
    model: str | None = None


class DetokenizeRequest(_Strict):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class TemplateRequest(_Strict):
    """The body of POST /apply-template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    model: str | None = None


class Tokens(BaseModel):
    """The answer of /tokenize."""

    tokens: list[int]


class Content(BaseModel):
    """The answer of /detokenize."""

    content: str


class Prompt(BaseModel):
    """The answer of /apply-template."""

    prompt: str


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail
