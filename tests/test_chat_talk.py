"""A conversation on a scripted engine: what is sent, taken back and carried over. No terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_decoder import END, FakeDecoder, Script, engine_on

from dspark_edge import Engine
from dspark_edge.chat.commands import run_command
from dspark_edge.chat.options import parser
from dspark_edge.chat.reply import Reply
from dspark_edge.chat.screen import Screen
from dspark_edge.chat.talk import Talk
from dspark_edge.errors import ModelError
from dspark_edge.trace import read_trace

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


def stop_before_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_edge.chat.talk.make_reply", lambda *_, **__: Reply())


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


# ---------------------------------------------------------------- turns that were dropped


def test_turns_dropped_for_a_message_that_is_taken_back_are_sent_again(
    open_talk: OpenTalk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = open_talk("fine")
    for text in ("a" * 90, "b" * 90):
        talk.ask(text)
    talk.ask("c" * 200)
    assert talk.conversation.n_dropped == 2
    run_command(talk, "/undo")
    assert "sent again: 2 older turns, dropped for its sake" in capsys.readouterr().err
    assert talk.conversation.n_dropped == 0
    stop_before_the_first_word(monkeypatch)
    talk.ask("c" * 200)
    assert (len(talk.conversation.turns), talk.conversation.n_dropped) == (2, 0)
    talk.again("c" * 250)
    assert (len(talk.conversation.turns), talk.conversation.n_dropped) == (2, 0)


def test_a_retry_that_is_stopped_leaves_what_was_dropped_as_it_was(
    open_talk: OpenTalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = open_talk("fine")
    for text in ("a" * 90, "b" * 90, "c" * 200):
        talk.ask(text)
    stop_before_the_first_word(monkeypatch)
    talk.again()
    assert (len(talk.conversation.turns), talk.conversation.n_dropped) == (3, 2)
    talk.conversation.undo()
    assert talk.conversation.n_dropped == 0


# ---------------------------------------------------------------- another model


def plain_engine() -> Engine:
    return engine_on(FakeDecoder(template=TEMPLATE), mode="auto")


def test_speculation_stays_switched_with_another_model(open_talk: OpenTalk) -> None:
    talk = open_talk("fine", loads=[plain_engine()])
    run_command(talk, "/spec off")
    talk.take_model("other.gguf")
    assert talk.engine.speculation_mode == "off"


def test_a_switch_that_another_model_does_not_allow_is_said(
    open_talk: OpenTalk, capsys: pytest.CaptureFixture[str]
) -> None:
    without = engine_on(FakeDecoder(template=TEMPLATE), "off", None)
    talk = open_talk("fine", loads=[without, plain_engine()])
    run_command(talk, "/spec on")
    talk.take_model("other.gguf")
    said = capsys.readouterr().err
    assert "/spec does not hold for this model: speculation cannot be switched on" in said
    talk.take_model("a-third.gguf")  # it was asked for, and holds where it can
    assert talk.engine.speculation_mode == "always"


def test_a_trace_asked_for_at_the_start_writes_over_no_file(
    open_talk: OpenTalk, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="notes is there already; give another name"):
        open_talk("fine", "--trace", str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "mine"
    talk = open_talk("fine", "--trace", str(tmp_path / "trace"))
    talk.ask("a")
    assert len(read_trace(tmp_path / "trace").rounds) > 0
    talk = open_talk("fine", "--trace", os.devnull)
    assert talk.trace == os.devnull


def test_a_model_that_cannot_be_loaded_costs_no_switch_and_says_that_the_trace_ended(
    open_talk: OpenTalk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = open_talk("fine", loads=[ModelError("broken"), plain_engine()])
    run_command(talk, "/spec off")
    run_command(talk, f"/trace {tmp_path / 'trace'}")
    with pytest.raises(ModelError, match="broken"):
        talk.take_model("other.gguf")
    assert talk.engine.speculation_mode == "off"
    assert talk.trace == ""
    assert "the trace has ended with the model" in capsys.readouterr().err
