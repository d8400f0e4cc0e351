"""Splitting replies, schemas and grammars: no server, no model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_edge.server.errors import ApiError
from dspark_edge.server.json_schema import grammar_of
from dspark_edge.server.prompts import PromptTemplate, ToolStyle
from dspark_edge.server.reply import ReplySplitter
from dspark_edge.server.schemas import Message, Tool
from dspark_edge.server.settings import Limits
from dspark_edge.server.tools import after_thought, call_grammar, parse_bare_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def split(
    pieces: Sequence[str], style: ToolStyle = "none", *, thinks: bool = True, inside: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls) of a reply that comes in these pieces."""
    names = frozenset() if style == "none" else frozenset({"add", "sub"})
    splitter = ReplySplitter(thinks=thinks, is_thinking=inside, style=style, names=names)
    deltas = [splitter.push(piece) for piece in pieces] + [splitter.push("", is_last=True)]
    calls = [(call.name, call.arguments) for delta in deltas for call in delta.calls]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("hm\n</think>\n\nyes", True, ("hm", "yes")),
        ("yes", False, ("", "yes")),
        ("  yes <think>", False, ("", "  yes <think>")),
        ("<think>never done", False, ("never done", "")),
        ("<thin ice", False, ("", "<thin ice")),
        ("<think></think>yes", False, ("", "yes")),
        ("a < b </think> c", True, ("a < b ", " c")),
    ],
)
def test_a_thought_is_told_from_the_reply(
    text: str, inside: bool, expected: tuple[str, str]
) -> None:
    assert split([text], inside=inside)[:2] == expected


def test_a_model_that_does_not_think_may_write_the_mark() -> None:
    assert split(["<think>x</think>"], thinks=False)[1] == "<think>x</think>"


@pytest.mark.parametrize(
    ("text", "content", "n_calls"),
    [
        (CALL, "", 1),
        (f"{CALL}\n{CALL}", "", 2),
        (f"Let me see. {CALL}", "Let me see. ", 1),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", 0),
        (CALL.replace("add", "unknown"), CALL.replace("add", "unknown"), 0),
        ('<tool_call>{"name": "add"', '<tool_call>{"name": "add"', 0),
        ("a <tool", "a <tool", 0),
    ],
)
def test_hermes_calls_are_parsed_and_nothing_is_lost(text: str, content: str, n_calls: int) -> None:
    _, said, calls = split([text], "hermes")
    assert (said, len(calls)) == (content, n_calls)
    assert all(call == ("add", '{"a": 1}') for call in calls)


@pytest.mark.parametrize(
    ("text", "content", "n_calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", 1),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", 1),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}', "", 2),
        ('{"answer": 42}', '{"answer": 42}', 0),
        ("plain {text}", "plain {text}", 0),
        ('{"name": "add", "par', '{"name": "add", "par', 0),
    ],
)
def test_llama_calls_are_parsed_and_nothing_is_lost(text: str, content: str, n_calls: int) -> None:
    _, said, calls = split([text], "llama")
    assert (said, len(calls)) == (content, n_calls)


def test_arguments_written_as_text_are_understood() -> None:
    calls = parse_bare_calls('{"name": "add", "arguments": "{\\"a\\": 1}"}', frozenset({"add"}))
    assert calls[0].arguments == '{"a": 1}'


def test_half_a_surrogate_pair_in_arguments_loses_no_reply() -> None:
    text = '{"name": "add", "parameters": {"a": "\\ud83d", "b": "\u00e9"}}'
    _, said, calls = split([text], "llama")
    assert said == ""
    assert calls[0][1].encode()  # can be sent
    assert json.loads(calls[0][1]) == {"a": "\ud83d", "b": "\u00e9"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_arguments_that_json_does_not_know_stay_text(number: str) -> None:
    text = f'{{"name": "add", "parameters": {{"a": {number}}}}}'
    assert split([text], "llama") == ("", text, [])


@given(
    st.sampled_from(["hermes", "llama", "none"]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "\n", "a", "<", CALL, "<tool_call>", "{", "</tool"])
    ),
    st.lists(st.integers(0, 200)),
    st.booleans(),
)
def test_the_split_does_not_depend_on_the_pieces(
    style: ToolStyle, parts: list[str], cuts: list[int], inside: bool
) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    reasoning, content, calls = split(pieces, style, inside=inside)
    whole = split([text], style, inside=inside)
    # Blank lines at the seams of thought, calls and content may be kept or not.
    assert reasoning.replace("\n", "") == whole[0].replace("\n", "")
    assert content.replace("\n", "") == whole[1].replace("\n", "")
    assert calls == whole[2]


def tool(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


def test_definitions_of_two_tools_are_not_mixed_up() -> None:
    def with_def(word: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "$defs": {"X": {"enum": [word]}},
        }

    tools = [tool("f", with_def("red")), tool("g", with_def("blue"))]
    grammar = call_grammar(tools, "hermes", parallel=True, limits=Limits())
    rules = dict(line.split(" ::= ", 1) for line in grammar.splitlines())
    assert "red" in rules["def-0-0"]
    assert "blue" in rules["def-1-0"]


def test_a_thought_may_come_before_what_a_grammar_asks_for() -> None:
    grammar = grammar_of([{"type": "boolean"}], lambda s: s[0], "response_format", Limits())
    assert after_thought(grammar, is_thinking=True).startswith("root ::= thought answer\n")
    assert '( "<think>" thought )? answer' in after_thought(grammar, is_thinking=False)


QWEN_LIKE = (
    "{%- if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{%- for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ custom or '' }}"
)


def test_a_template_gets_arguments_as_objects_and_developers_as_system() -> None:
    template = PromptTemplate(QWEN_LIKE, begin="", end="")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    messages = [
        Message.model_validate({"role": "developer", "content": "be brief"}),
        Message.model_validate({"role": "assistant", "tool_calls": [call]}),
        Message.model_validate({"role": "user", "content": [{"type": "text", "text": "hi"}]}),
    ]
    assert template.render(messages).text == "[system]be brief[assistant]5[user]hi"
    silent = template.render(messages, reasoning_effort="none").text
    assert silent.endswith("<think></think>")
    assert template.render(messages, variables={"custom": "!"}).text.endswith("!")


def called(*arguments: str) -> Message:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return Message.model_validate({"role": "assistant", "tool_calls": calls})


def test_a_call_without_arguments_may_come_back_with_an_empty_text() -> None:
    template = PromptTemplate(QWEN_LIKE, begin="", end="")
    assert template.render([called("", '{"a": 5}', " ")]).text == "[assistant]5"


def test_arguments_that_are_no_json_are_refused_by_their_place() -> None:
    template = PromptTemplate(QWEN_LIKE, begin="", end="")
    with pytest.raises(ApiError, match="'a=5', which is no JSON") as refusal:
        template.render([called("{}"), called("{}", "a=5")])
    assert refusal.value.message.startswith("messages[1].tool_calls[1].function.arguments is ")


def test_the_form_of_calls_is_read_off_the_template() -> None:
    llama = "{{ tools }} ipython {{ messages }}"
    assert PromptTemplate(llama, begin="", end="").tool_style == "llama"
    assert PromptTemplate(QWEN_LIKE, begin="", end="").tool_style == "hermes"
    assert PromptTemplate("{{ messages }}", begin="", end="").tool_style == "none"


def test_a_schema_of_several_types_keeps_what_belongs_to_each() -> None:
    schema = {"type": ["string", "null"], "maxLength": 2}
    grammar = grammar_of([schema], lambda s: s[0], "response_format", Limits())
    assert '"null"' in grammar
    assert "char" in grammar
