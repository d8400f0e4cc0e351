"""A conversation on a scripted engine: what is sent, taken back and carried over. No terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_decoder import END, FakeDecoder, Script, engine_on

from dspark_edge import Engine
from dspark_edge.chat.options import parser
from dspark_edge.chat.screen import Screen
from dspark_edge.chat.talk import Talk

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}>"
FOX = "\U0001f98a"
OpenTalk = Callable[..., Talk]


def answering(text: str) -> Script:
    """A target that says a text behind every prompt of the template."""
    reply = [*text.encode(), END]

    def script(before: Sequence[int]) -> int:
        begin = len(before) - list(before)[::-1].index(ord(">"))
        return reply[min(len(before) - begin, len(reply) - 1)]

    return script


@pytest.fixture
def open_talk(monkeypatch: pytest.MonkeyPatch) -> OpenTalk:
    """A talk with engines that answer a text, and others that `loads` gives in their place."""

    def open_one(
        text: str, *options: str, n_ctx: int = 300, loads: Sequence[Engine | Exception] = ()
    ) -> Talk:
        coming = iter([engine_on(FakeDecoder(answering(text), n_ctx=n_ctx, template=TEMPLATE))])

        def load(args: object, model: str) -> Engine:
            if isinstance(engine := next(coming), Exception):
                raise engine
            return engine

        monkeypatch.setattr("dspark_edge.chat.talk._load_engine", load)
        monkeypatch.setattr("dspark_edge.chat.talk.target_path", Path)
        talk = Talk(parser().parse_args(options), Screen())
        coming = iter(loads)
        return talk

    return open_one


# ---------------------------------------------------------------- a context that fills up


@pytest.mark.parametrize("n", range(4))
def test_a_character_that_the_full_context_cuts_stays_whole(open_talk: OpenTalk, n: int) -> None:
    talk = open_talk(FOX * 30)
    talk.ask("a" * 100)
    reply = talk.ask("b" * n)
    assert len(reply.parts) == 2  # it went on in a fresh request
    assert reply.text == FOX * 30
    assert reply.finish_reason == "stop"


@pytest.mark.parametrize("n", range(4))
def test_a_stop_string_that_the_full_context_cuts_is_found(open_talk: OpenTalk, n: int) -> None:
    talk = open_talk("y" * 74 + "STOP" + "z" * 40)
    talk.ask("a" * 100)
    talk.params = replace(talk.params, stop=("STOP",))
    reply = talk.ask("b" * n)
    assert reply.text == "y" * 74
    assert reply.finish_reason == "stop"


def test_half_a_character_at_the_very_end_is_said(open_talk: OpenTalk) -> None:
    talk = open_talk(FOX, "--max-tokens", "3")
    assert talk.ask("a").text == "\ufffd"
