"""The chat used day by day: help, Tab, thoughts, exports, pastes, widths; and what is wrong on the
disk or in memory, told as a new user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixed_reply import write_fixed_reply
from terminal import (
    CHAT,
    CTRL_C,
    PASTE,
    PASTE_END,
    PATIENCE_S,
    TAB,
    UP,
    Terminal,
    chat_environment,
)
from tiny_models import DrafterSpec, TargetSpec, vocabulary, write_drafter, write_llama

from dspark_edge.chat.commands import COMMANDS
from dspark_edge.models.gguf_header import read_header
from dspark_edge.models.memory_estimate import Setting
from dspark_edge.models.memory_plan import Room, make_plan

STATUS = r"\d+ tokens, \d+\.\d tok/s"
THOUGHT, TEXT = "abcdefg", "Owls"
Open = Callable[..., Terminal]


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Open]:
    """A chat; where no model is named, with one that thinks THOUGHT and says TEXT."""
    opened: list[Terminal] = []

    def open_one(
        *options: str, columns: int = 100, program: tuple[str, ...] = CHAT, **env: str
    ) -> Terminal:
        how: tuple[str, ...] = ("--ctx", "512", "--threads", "1", "--temperature", "0")
        if "--model" not in options:
            path = write_fixed_reply(tmp_path / "owl.gguf", thought=THOUGHT, text=TEXT)
            how = (*how, "--model", str(path), "--drafter", "none")
        terminal = Terminal(
            chat_environment(tmp_path) | env, *how, *options, columns=columns, program=program
        )
        opened.append(terminal)
        return terminal

    yield open_one
    for terminal in opened:
        terminal.close()


def begun(terminal: Terminal) -> Terminal:
    terminal.banner = terminal.wait_for_prompt()
    return terminal


def exported(terminal: Terminal, path: Path) -> str:
    terminal.say(f"/export {path}")
    return path.read_text()


# ---------------------------------------------------------------- words


def test_help_has_a_line_for_each_command_and_fits_the_usual_width(open_chat: Open) -> None:
    chat = begun(open_chat(columns=80))
    lines = chat.say("/help").splitlines()
    for command in COMMANDS:
        (line,) = [line for line in lines if line.split("  ")[0] == command.usage]
        assert line.endswith(command.help), line
    columns = {line.index(c.help) for c in COMMANDS for line in lines if line.endswith(c.help)}
    assert len(columns) == 1  # aligned
    assert max(map(len, lines)) <= 80


def test_tab_completes_commands_sessions_and_paths(open_chat: Open, tmp_path: Path) -> None:
    chat = begun(open_chat(columns=160))
    chat.say("Hi")
    chat.say("/save trip to Rome --no-kv")
    folder = tmp_path / "note books"
    folder.mkdir()
    (folder / "old.md").write_text("old")
    chat.send(f"/ses{TAB}")
    chat.wait_until_shown("> /sessions")
    chat.send("\r")
    chat.wait_for_prompt()
    chat.send(f"/load tr{TAB}")
    chat.wait_until_shown("> /load trip to Rome")
    chat.send("\r")
    assert "trip to Rome: 1 turn" in chat.wait_for_prompt()
    chat.send(f"/export {tmp_path}/note{TAB}")
    chat.wait_until_shown(f"> /export {re.escape(str(folder))}/")
    chat.send(f"o{TAB}")
    chat.wait_until_shown(f"> /export {re.escape(str(folder))}/old\\.md")
    chat.send("\r")
    assert "is there already" in chat.wait_for_prompt().replace("\n", " ")
    chat.send(f"/spec o{TAB}")  # two words begin so: both are shown
    chat.wait_until_shown(r"(?s)> /spec o.*\bon\b.*\boff\b")
    chat.send(CTRL_C)


def test_a_wide_terminal_folds_nothing_and_a_narrow_one_loses_nothing(open_chat: Open) -> None:
    wide = begun(open_chat(columns=250))
    assert [line.split(":")[0] for line in wide.banner.splitlines()[:5]] == [
        *("model", "drafter", "device", "memory", "speculation")
    ]
    narrow = begun(open_chat(columns=24))
    assert max(map(len, narrow.banner.splitlines())) <= 24
    assert "speculation: off" in " ".join(narrow.banner.split())
    shown = " ".join(narrow.say("/help").split())
    for command in COMMANDS:
        assert " ".join(f"{command.usage} {command.help}".split()) in shown


@pytest.mark.parametrize("columns", [60, 80, 90, 100])
def test_the_banner_fits_six_rows_also_where_paths_and_reasons_are_long(
    open_chat: Open, tmp_path: Path, columns: int
) -> None:
    folder = tmp_path / "a folder with a long name" / "and in it another one" / "of models"
    folder.mkdir(parents=True)
    target = write_llama(folder / "a-model-with-quite-a-long-name-Instruct.gguf")
    (folder / f"dspark-{target.name}").write_bytes(b"this is no drafter")
    nowhere = {"XDG_CACHE_HOME": f"/proc/none{'/far/away' * 9}", "XDG_STATE_HOME": "/proc/none"}
    chat = begun(open_chat("--model", str(target), "--ctx", "2048", columns=columns, **nowhere))
    rows = [row for row in chat.banner.splitlines() if row.strip() not in ("", ">")]
    assert len(rows) <= 6
    assert max(map(len, rows)) <= columns
    for name in ("model: a-model", "drafter: lookup (", "device: ", "memory: ", "speculation: "):
        assert any(row.startswith(name) for row in rows), name
    assert any("…" in row for row in rows)
    whole = " ".join(chat.say("/model").split())  # nothing is lost for who asks
    assert "…" not in whole
    assert target.name in whole


def test_no_color_is_heeded_where_there_would_be_styles(open_chat: Open) -> None:
    styled = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")
    plain, coloured = begun(open_chat(NO_COLOR="1")), begun(open_chat())
    for chat in (plain, coloured):
        chat.say("Hi")
        chat.say("/show")
    assert styled.search(coloured.raw)
    assert not styled.search(plain.raw)


# ---------------------------------------------------------------- thoughts


def test_thoughts_are_dimmed_hidden_when_asked_and_never_sent_back(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = begun(open_chat())
    assert re.search(rf"<think>\n{THOUGHT}\n</think>\n\n{TEXT}", chat.say("Q"))
    assert f"\x1b[2m{THOUGHT[-1]}" in chat.raw or f"{THOUGHT}\x1b[0m" in chat.raw
    assert "thoughts = show" in chat.say("/set thoughts")
    assert "thoughts = hide" in chat.say("/set thoughts hide")
    shown = chat.say("R")
    assert TEXT in shown
    assert "think" not in shown
    assert THOUGHT not in shown
    # begin; role, Q, end; role, the text and no thought, end; role, R, end; role.
    n_prompt = 1 + 3 + (2 + len(TEXT)) + 3 + 1
    assert f"prompt: {n_prompt} tokens" in chat.say("/stats")
    assert "it must be show or hide" in chat.say("/set thoughts maybe")
    messages = json.loads(exported(chat, tmp_path / "it.json"))["messages"]
    assert [m["content"] for m in messages] == ["Q", TEXT, "R", TEXT]
    chat.say("/set thoughts show")
    assert f"\n{THOUGHT}\n" in chat.say("/retry")


# ---------------------------------------------------------------- what goes in and out


def test_an_export_as_markdown_is_the_conversation_to_read(open_chat: Open, tmp_path: Path) -> None:
    chat = begun(open_chat("--system", "Be terse."))
    chat.send(f"{PASTE}one\n\n```\ntwo\n```{PASTE_END}\r")
    chat.wait_for(STATUS)
    chat.wait_for_prompt()
    assert exported(chat, tmp_path / "it.md") == (
        f"## System\n\nBe terse.\n\n## User\n\none\n\n```\ntwo\n```\n\n## Assistant\n\n{TEXT}\n"
    )


def test_a_paste_of_many_lines_is_one_message(open_chat: Open, tmp_path: Path) -> None:
    chat = begun(open_chat("--ctx", "4096"))
    text = "\n".join(f"{n}" for n in range(1, 101))
    chat.send(f"{PASTE}{text}{PASTE_END}\r")
    chat.wait_for(STATUS)
    chat.wait_for_prompt()
    messages = json.loads(exported(chat, tmp_path / "it.json"))["messages"]
    assert [m["content"] for m in messages] == [text, TEXT]


def test_with_no_history_nothing_that_was_typed_is_kept(open_chat: Open, tmp_path: Path) -> None:
    chat = begun(open_chat("--no-history"))
    chat.say("a secret")
    chat.send(UP)  # in this run it can be had back
    chat.wait_until_shown(r"(?m)^> a secret$(?=\n*\Z)")
    chat.send(CTRL_C)
    chat.enter("/quit")
    assert chat.exit_code() == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".gguf"]
    assert not [path for path in files if b"a secret" in path.read_bytes()]


# ---------------------------------------------------------------- scenario 12, as a new user


OTHER_TOKEN = {"tokenizer.ggml.tokens": ["x", *vocabulary()[1:]]}
BROKEN: dict[str, tuple[DrafterSpec | None, str]] = {
    "no drafter at all": (None, "no drafter|is no GGUF|not a GGUF"),
    "another architecture": (DrafterSpec(arch="dfish"), "dfish"),
    "another tokenizer": (DrafterSpec(metadata=OTHER_TOKEN), "token"),
    "another hidden size": (DrafterSpec(target=TargetSpec(n_embd=128)), "128"),
    "a layer that is not there": (DrafterSpec(target_layers=(1, 9)), "9"),
}


def test_a_broken_drafter_beside_the_model_is_named_with_the_reason(
    open_chat: Open, tmp_path: Path
) -> None:
    chat = begun(open_chat("--drafter", "auto", "--speculation", "always"))
    for n, (what, (spec, reason)) in enumerate(BROKEN.items()):
        folder = tmp_path / f"m{n}"
        folder.mkdir()
        target = write_llama(folder / "m.gguf")
        if spec is None:
            (folder / "dspark-m.gguf").write_bytes(b"this is no drafter")
        else:
            write_drafter(folder / "dspark-m.gguf", spec)
        shown = " ".join(chat.say(f"/model {target}").split())
        drafter = re.findall(r"drafter: (.*?) device: ", shown)[-1]
        assert drafter.startswith("lookup ("), what
        assert "dspark-m.gguf" in drafter, what
        assert re.search(reason, drafter), f"{what}: {drafter}"
        assert "Traceback" not in shown
    assert re.search(STATUS, chat.say("Hi"))


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_drafter_that_was_asked_for_is_one_line_before_the_prompt(
    open_chat: Open, tmp_path: Path, what: str
) -> None:
    spec, reason = BROKEN[what]
    target, drafter = write_llama(tmp_path / "m.gguf"), tmp_path / "d.gguf"
    if spec is None:
        drafter.write_bytes(b"this is no drafter")
    else:
        write_drafter(drafter, spec)
    chat = open_chat("--model", str(target), "--drafter", str(drafter), columns=250)
    assert chat.exit_code() == 1
    (line,) = re.findall(r"error: (.*)\r\n", chat.raw)
    assert re.search(reason, line)
    assert "> " not in chat.raw


def test_a_drafter_without_confidence_head_works_and_says_nothing(
    open_chat: Open, tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "m.gguf")
    write_drafter(tmp_path / "dspark-m.gguf", DrafterSpec(confidence=False))
    chat = begun(open_chat("--model", str(target), "--speculation", "always"))
    assert "drafter: dspark-m.gguf" in chat.banner
    assert "speculation: always on (drafter)" in chat.banner
    assert re.search("accepted [0-9]+ %", chat.say("/set max_tokens 20") + chat.say("Hi"))


# ---------------------------------------------------------------- scenario 17


WITH_ROOM = (  # as if only so much memory might be used
    "import sys\n"
    "from dspark_edge.models import memory_plan\n"
    "room = memory_plan.Room(int(sys.argv.pop(1)))\n"
    "memory_plan.read_room = lambda: room\n"
)
CHAT_WITH_ROOM = f"{WITH_ROOM}from dspark_edge.chat import main\nsys.exit(main(sys.argv[1:]))\n"
FIT_WITH_ROOM = (
    f"{WITH_ROOM}from dspark_edge.models.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
)


def test_too_little_memory_for_the_drafter_is_said_by_the_chat_and_by_models_fit(
    open_chat: Open, tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "m.gguf")
    drafter = write_drafter(tmp_path / "dspark-m.gguf")
    heads, setting = (read_header(target), read_header(drafter)), Setting(n_ctx=512)
    alone, both = (
        make_plan(heads[0], head, setting, Room(None)).ram_bytes for head in (None, heads[1])
    )
    room = str((alone + both) // 2)
    chat = begun(open_chat("--model", str(target), program=("-c", CHAT_WITH_ROOM, room)))
    shown = " ".join(chat.banner.split())
    assert "drafter: lookup (drafter dspark-m.gguf is left out" in shown
    assert "context: 512 tokens" in shown  # kept whole
    assert re.search(STATUS, chat.say("/set max_tokens 4") + chat.say("Hi"))
    refused = open_chat(
        *("--model", str(target), "--drafter", str(drafter)),
        columns=250,
        program=("-c", CHAT_WITH_ROOM, room),
    )
    assert refused.exit_code() == 1
    assert "leave the drafter out" in refused.raw
    done = subprocess.run(
        [sys.executable, "-c", FIT_WITH_ROOM, room, "fit", str(target), "--ctx", "512"],
        env=chat_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 3
    assert "dropped first: the drafter; without it everything fits" in done.stdout


def test_too_little_memory_for_the_model_ends_the_chat_with_one_line(
    open_chat: Open, tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "m.gguf")
    program = ("-c", CHAT_WITH_ROOM, "1000")
    chat = open_chat("--model", str(target), columns=250, program=program)
    assert chat.exit_code() == 1
    (line,) = re.findall(r"error: (.*)\r\n", chat.raw)
    assert "m.gguf" in line
    assert "no context is small enough" in line
