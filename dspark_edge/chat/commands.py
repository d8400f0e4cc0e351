"""What a line that begins with a slash does, and what Tab makes of its beginning.

Owns the commands' names and words. Refuses to know how lines are typed.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import DsparkError
from ..files import refuse_existing
from ..models.catalogue import catalogue
from ..speculation import Mode
from . import figures, kept, settings
from .conversation import Conversation
from .export import export
from .talk import Talk

MODES: dict[str, Mode] = {"on": "always", "off": "off", "auto": "auto"}
Words = Callable[[str], list[str]]  # the beginning of a word -> words that begin so


class Leave(Exception):  # noqa: N818 - no error
    """The user wants to leave."""


@dataclass(slots=True, frozen=True)
class Command:
    """usage: with its argument; words: for Tab, what the argument may be."""

    usage: str
    help: str
    run: Callable[[Talk, str], None]
    words: Words = lambda begun: []

    @property
    def name(self) -> str:
        """The word with its slash."""
        return self.usage.split()[0]


def run_command(talk: Talk, line: str) -> None:
    """Runs one line. Raises ValueError for an unknown command, Leave, and what the command does."""
    name, _, argument = line.strip().partition(" ")
    command = _found(name)
    if command is None:
        raise ValueError(f"there is no command {name}; /help lists them, a blank in front sends it")
    command.run(talk, argument.strip())


def complete(text: str) -> tuple[str, list[str]]:
    """For the text before the cursor: the word to replace, and what may stand there."""
    if not text.startswith("/") or "\n" in text:
        return "", []
    name, blank, begun = text.partition(" ")
    if not blank:
        return text, [c.name for c in COMMANDS if c.name.startswith(text)]
    command = _found(name)
    return begun, command.words(begun) if command else []


def _found(name: str) -> Command | None:
    name = "/quit" if name == "/exit" else name
    return next((c for c in COMMANDS if c.name == name), None)


def _help(talk: Talk, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS)
    for command in COMMANDS:
        talk.screen.say(f"{command.usage:<{width}}  {command.help}")
    talk.screen.say(
        "Enter sends; Alt-Enter, or a backslash at the end, begins another line. Tab completes. "
        "Ctrl-C stops a reply, twice leaves."
    )


def _system(talk: Talk, argument: str) -> None:
    if argument:
        talk.conversation.system = "" if argument == "none" else argument
    talk.screen.state(f"system message: {talk.conversation.system or 'none'}")


def _model(talk: Talk, argument: str) -> None:
    if argument:
        talk.take_model(argument)
    for line in talk.banner():
        talk.screen.state(line)


def _new(talk: Talk, argument: str) -> None:
    talk.conversation = Conversation(system=talk.conversation.system)
    talk.stats, talk.session = None, ""
    talk.screen.state("a new conversation; the system message stays")


def _undo(talk: Talk, argument: str) -> None:
    turn = talk.conversation.undo()
    if turn is None:
        raise _no_message("take back")
    talk.screen.state(f"taken back: {_short(turn.user)}")
    if turn.n_dropped:
        turns = "turn" if turn.n_dropped == 1 else "turns"
        talk.screen.state(f"sent again: {turn.n_dropped} older {turns}, dropped for its sake")


def _retry(talk: Talk, argument: str) -> None:
    if not talk.conversation.turns:
        raise _no_message("reply to again")
    talk.again()
    if talk.params.temperature == 0:
        talk.screen.state("at temperature 0 a new seed changes nothing; /set temperature 0.7")


def _edit(talk: Talk, argument: str) -> None:
    turns = talk.conversation.turns
    if not turns:
        raise _no_message("edit")
    text = argument or talk.edit(turns[-1].user)
    if text.strip():
        talk.again(text)
    else:
        talk.screen.state("nothing is sent; the message stays as it was")


def _save(talk: Talk, argument: str) -> None:
    words = argument.split()
    with_cache, may_replace = "--no-kv" not in words, "--replace" in words
    name = " ".join(w for w in words if w not in ("--no-kv", "--replace")) or talk.session
    if not name:
        raise ValueError("the session has no name yet; /save NAME")
    if not talk.conversation.turns:
        raise _no_message("save")
    if name != talk.session and not may_replace and kept.exists(name):
        raise ValueError(
            f"there is a session {name!r} already; give another name, or /save --replace {name}"
        )
    for line in talk.save(name, with_cache=with_cache):
        talk.screen.state(line)
    talk.screen.state(f"saved as {name}")


def _load(talk: Talk, argument: str) -> None:
    if not argument:
        raise ValueError("which one? /sessions lists them, /load NAME")
    for line in talk.load(argument):
        talk.screen.state(line)
    turns = talk.conversation.turns
    talk.screen.state(f"{argument}: {len(turns)} turn{'' if len(turns) == 1 else 's'}")
    if turns:
        talk.screen.state(f"last: {_short(turns[-1].user)} -> {_short(turns[-1].reply)}")


def _sessions(talk: Talk, argument: str) -> None:
    for line in kept.listing() or ["no sessions are saved yet; /save NAME"]:
        talk.screen.say(line)


def _export(talk: Talk, argument: str) -> None:
    if not argument:
        raise ValueError("where to? /export FILE.md, or FILE.json")
    path = Path(argument).expanduser()
    if not talk.conversation.turns:
        raise _no_message("export")
    refuse_existing(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first, or give another name")
    export(talk.conversation, path)
    talk.screen.state(f"written to {path}")


def _set(talk: Talk, argument: str) -> None:
    name, text = _name_and_value(argument)
    if name in ("thoughts", *settings.SETTINGS) and not text:
        pass  # only shown
    elif name == "thoughts":
        if text not in ("show", "hide"):
            raise ValueError(f"thoughts is {text!r}; it must be show or hide")
        talk.shows_thoughts = text == "show"
    elif name:
        params = settings.changed(talk.params, name, text)
        talk.engine.check(params)
        talk.params = params
    for line in settings.shown(talk.params):
        if name in ("", line.split()[0]):
            talk.screen.say(line)
    if name in ("", "thoughts"):
        talk.screen.say(f"thoughts = {'show' if talk.shows_thoughts else 'hide'}")


def _name_and_value(argument: str) -> tuple[str, str]:
    """NAME VALUE, NAME=VALUE, or NAME = VALUE as /set shows it; a value may hold "=" itself."""
    name = re.split(r"[\s=]", argument, maxsplit=1)[0]
    rest = argument[len(name) :]
    return name, re.sub(r"^(=|\s+=\s)", "", rest).strip()


def _stats(talk: Talk, argument: str) -> None:
    for line in figures.statistics(talk.engine, talk.stats):
        talk.screen.say(line)


def _trace(talk: Talk, argument: str) -> None:
    if not argument:
        raise ValueError("where to? /trace FILE, or /trace off")
    talk.trace_to("" if argument == "off" else argument)
    if argument == "off":
        talk.screen.state("no trace is written")
    else:
        talk.screen.state(f"a trace is written to {argument}; bench explain renders it")


def _spec(talk: Talk, argument: str) -> None:
    if argument:
        if argument not in MODES:
            raise ValueError(f"/spec is {argument!r}; it must be on, off or auto")
        talk.set_speculation(MODES[argument])
    talk.screen.state(f"speculation: {talk.engine.speculation_state}")


def _show(talk: Talk, argument: str) -> None:
    turns = talk.conversation.turns
    if not turns:
        raise _no_message("show the reply to")
    pieces = turns[-1].pieces
    if not pieces:
        raise ValueError("the tokens of a loaded reply are not known; /retry makes a new one")
    in_style = talk.screen.says_in_style
    talk.screen.pieces(figures.coloured(pieces, in_style=in_style))
    talk.screen.state(figures.legend(pieces, in_style=in_style))


def _quit(talk: Talk, argument: str) -> None:
    raise Leave


def _no_message(purpose: str) -> ValueError:
    return ValueError(f"there is no message yet to {purpose}; type one and press Enter")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


# ---------------------------------------------------------------- Tab


def _among(*words: str) -> Words:
    return lambda begun: [word for word in words if word.startswith(begun)]


def _paths(begun: str) -> list[str]:
    found = sorted(glob.glob(glob.escape(os.path.expanduser(begun)) + "*"))
    return [f"{path}{os.sep}" if os.path.isdir(path) else path for path in found]


def _models(begun: str) -> list[str]:
    return _among(*(entry.name for entry in catalogue().targets()))(begun) + _paths(begun)


def _names(begun: str) -> list[str]:
    try:
        return _among(*kept.names())(begun)
    except (DsparkError, ValueError, OSError):  # said when the command itself is run
        return []


COMMANDS = (
    Command("/help", "this list", _help),
    Command("/system [TEXT|none]", "show or change the system message", _system),
    Command("/model [NAME|FILE]", "what is loaded, or go on with another model", _model, _models),
    Command("/new", "a new conversation", _new),
    Command("/undo", "take the last turn back", _undo),
    Command("/retry", "reply again, with a new seed", _retry),
    Command("/edit [TEXT]", "change the last message and send it again", _edit),
    Command(
        "/save [NAME] [--no-kv]",
        "save it; --no-kv: text only; --replace: over another",
        _save,
        _names,
    ),
    Command("/load NAME", "go on with a saved session", _load, _names),
    Command("/sessions", "list the saved sessions", _sessions),
    Command("/export FILE", "write the conversation as Markdown or .json", _export, _paths),
    Command(
        "/set [NAME VALUE]",
        "show or change temperature, seed, max_tokens, ...",
        _set,
        _among(*settings.SETTINGS, "thoughts show", "thoughts hide"),
    ),
    Command("/stats", "what the last reply cost and gained", _stats),
    Command("/trace FILE|off", "one JSON line per round", _trace, _paths),
    Command("/spec [on|off|auto]", "speculation: its state, or switch it", _spec, _among(*MODES)),
    Command("/show", "the last reply, coloured by where each token came from", _show),
    Command("/quit", "leave", _quit),
)
