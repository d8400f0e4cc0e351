"""The clients that people use: openai's own, and LangChain's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from server_harness import WAIT_S, Running, answering, running, scripted, tiny_settings

from dspark_edge.server.settings import EngineOptions, Settings

HERMES = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }} answer in <tool_call></tool_call>"
    "<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}<|assistant|>"
)
LLAMA = HERMES.replace("answer in <tool_call></tool_call>", 'ipython {"name":, "parameters":}')
LLAMA = LLAMA.replace("<tool_call>{{ c.function | tojson }}</tool_call>", "{{ c.function }}")
THINKING = HERMES + "{# <think></think> #}"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def openai_client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0)


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[Running]:
    with running(tiny_settings(tiny_llama, chat_template=HERMES)) as server:
        yield server


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Running]:
    options = EngineOptions(n_ctx=1024, n_seq=2, n_threads=1, drafter=None)
    with running(Settings(engine=options)) as server:
        yield server


def test_openai_chat_and_stream_agree(tiny: Running) -> None:
    client = openai_client(tiny)
    whole = client.chat.completions.create(
        model="llama", messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True
    )
    stream = client.chat.completions.create(
        model="llama",
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12
    assert "llama" in [model.id for model in client.models.list()]


def test_openai_errors_are_the_clients_own_classes(tiny: Running) -> None:
    client = openai_client(tiny)
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="is not here"):
        create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="holds 512") as refused:
        create(model="llama", messages=[{"role": "user", "content": "x y " * 500}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        create(model="llama", messages=MESSAGES, temperature=-1)


def test_openai_can_cancel_a_stream(tiny: Running) -> None:
    stream = openai_client(tiny).chat.completions.create(
        model="llama", messages=MESSAGES, max_tokens=400, stream=True
    )
    next(iter(stream))
    stream.close()
    assert tiny.chat(max_tokens=2).status_code == 200


def test_openai_gets_an_error_from_a_stream_that_breaks(tiny_llama: Path) -> None:
    make = scripted(answering("hello world, how are you"), dead_end=14)
    with running(tiny_settings(tiny_llama), make) as server:
        stream = openai_client(server).chat.completions.create(
            model="llama", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="no token is allowed"):
            list(stream)


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_openai_tools_that_are_required_are_called(tiny_llama: Path, template: str) -> None:
    other: Any = {"type": "function", "function": {"name": "get_time"}}
    with running(tiny_settings(tiny_llama, chat_template=template)) as server:
        create = openai_client(server).chat.completions.create
        for choice, names in (
            ("required", {"get_weather", "get_time"}),
            ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ):
            answer = create(
                model="llama",
                messages=MESSAGES,
                tools=[WEATHER, other],
                tool_choice=choice,
                parallel_tool_calls=False,
                logit_bias={"34": 8},  # a random model hardly ever closes a string
            )
            assert answer.choices[0].finish_reason == "tool_calls"
            calls = answer.choices[0].message.tool_calls or []
            assert len(calls) == 1
            assert calls[0].function.name in names
            arguments = json.loads(calls[0].function.arguments)
            assert set(arguments) == ({"city"} if "weather" in calls[0].function.name else set())


def test_openai_tools_that_the_model_calls_by_itself(tiny_llama: Path) -> None:
    settings = tiny_settings(tiny_llama, chat_template=HERMES)
    with running(
        settings, scripted(answering(f"Let me see.\n{CALL}\n{CALL}"), n_ctx=4096)
    ) as server:
        create = openai_client(server).chat.completions.create
        answer = create(model="llama", messages=MESSAGES, tools=[WEATHER])
        message = answer.choices[0].message
        assert message.content == "Let me see.\n"
        assert len(message.tool_calls or []) == 2
        assert answer.choices[0].finish_reason == "tool_calls"
        one = create(
            model="llama",
            messages=MESSAGES,
            tools=[WEATHER],
            parallel_tool_calls=False,
            stream=True,
        )
        calls = [c for chunk in one for c in chunk.choices[0].delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in calls] == [(0, "get_weather")]
        silent = create(model="llama", messages=MESSAGES, tools=[WEATHER], tool_choice="none")
        assert "<tool_call>" in (silent.choices[0].message.content or "")
        # The result goes back, through the template.
        followed = create(
            model="llama",
            messages=[
                *MESSAGES,
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"},
            ],
            tools=[WEATHER],
        )
        assert followed.choices[0].finish_reason == "tool_calls"


def test_openai_reads_a_thought_apart_from_the_reply(tiny_llama: Path) -> None:
    settings = tiny_settings(tiny_llama, chat_template=THINKING)
    with running(settings, scripted(answering("<think>\nhm, so\n</think>\n\nIt rains."))) as server:
        client = openai_client(server)
        message = (
            client.chat.completions.create(model="llama", messages=MESSAGES).choices[0].message
        )
        stream = client.chat.completions.create(model="llama", messages=MESSAGES, stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert message.content == "It rains."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "hm, so"
    extras = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(extras) == "hm, so"
    assert "".join(delta.content or "" for delta in deltas) == "It rains."


class Answer(BaseModel):
    """Parsed by the clients."""

    city: str
    is_capital: bool


def test_openai_parses_json_that_fits_a_schema(smollm2: Running) -> None:
    answer = openai_client(smollm2).chat.completions.parse(
        model="default",
        messages=[{"role": "user", "content": "Is Paris a capital? Answer in JSON."}],
        response_format=Answer,
        temperature=0,
        max_tokens=60,
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert parsed.city


def test_openai_any_json_object(smollm2: Running) -> None:
    answer = openai_client(smollm2).chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": 'Say {"ok": true} in JSON.'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=80,
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def langchain(server: Running, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        timeout=WAIT_S,
        max_retries=0,
        temperature=0,
        **fields,
    )


def test_langchain_chats_and_streams(smollm2: Running) -> None:
    model = langchain(smollm2, model="default", max_tokens=12)
    whole = model.invoke("Name a river.")
    assert whole.content == "".join(str(chunk.content) for chunk in model.stream("Name a river."))
    assert whole.response_metadata["token_usage"]["completion_tokens"] == 12


def test_langchain_structured_output(smollm2: Running) -> None:
    model = langchain(smollm2, model="default", max_tokens=60)
    shaped = model.with_structured_output(Answer, method="json_schema")
    assert isinstance(shaped.invoke("Is Paris a capital?"), Answer)


def test_langchain_calls_tools(tiny_llama: Path) -> None:
    @tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return city

    with running(
        tiny_settings(tiny_llama, chat_template=HERMES), scripted(answering(CALL))
    ) as server:
        model = langchain(server, model="llama").bind_tools([get_weather])
        calls = model.invoke("What is the weather in Paris?").tool_calls
    assert [(call["name"], call["args"]) for call in calls] == [("get_weather", {"city": "Paris"})]
