"""Messages to prompt text, and clear words for what cannot be rendered."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_edge.errors import ModelError
from dspark_edge.prompt import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def a_template(text: str = CHATML) -> ChatTemplate:
    return ChatTemplate(text, bos="<s>", eos="</s>")


def test_the_prompt_ends_where_the_reply_begins() -> None:
    assert a_template().render(HELLO) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_it_ends_after_the_last_message() -> None:
    text = a_template().render(HELLO, add_generation_prompt=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n"


def test_begin_and_end_tokens_are_known_to_the_template() -> None:
    template = a_template("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}")
    assert template.render(HELLO) == "<s>Hello</s>"


def test_more_keys_of_a_message_reach_the_template() -> None:
    template = a_template("{{ messages[0].name }}")
    assert template.render([{"role": "user", "content": "", "name": "Ada"}]) == "Ada"


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_model_without_a_template_says_the_way_out(text: str) -> None:
    expected = r"no chat template; pass plain prompts to generate\(\)"
    with pytest.raises(ModelError, match=expected):
        a_template(text)


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"does not compile .*; pass plain prompts"):
        a_template("{% for m in messages %}")


def test_the_templates_own_refusal_is_passed_on() -> None:
    template = a_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        template.render(HELLO)


def test_a_template_cannot_leave_the_sandbox() -> None:
    with pytest.raises(ValueError, match=r"chat template refuses these messages: .*unsafe"):
        a_template("{{ ''.__class__.__mro__ }}").render(HELLO)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ("Hello", "messages is a str; pass a list of"),
        ({"role": "user", "content": "Hello"}, "messages is a dict; pass a list of"),
        (None, "messages is a NoneType; pass a list of"),
        ([], "messages is empty; pass at least one"),
        (["Hello"], "message 0 is a str; pass"),
        ([*HELLO, {"content": "Hello"}], 'message 1 has no "role" text; got None'),
        ([{"role": "user"}], 'message 0 has no "content" text; got None'),
        ([{"role": "user", "content": 3}], 'message 0 has no "content" text; got 3'),
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        a_template().render(messages)


def test_rendering_does_not_change_the_messages() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    a_template().render(messages)
    assert messages == HELLO
