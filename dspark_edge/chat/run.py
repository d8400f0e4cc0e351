"""Runs a chat that is loaded: one reply to a script, or a conversation with a person.

Replies go to stdout, everything else to stderr. Refuses to know how decoding works.
"""

from __future__ import annotations

import json
import sys

from ..arguments import in_flags
from ..errors import DsparkError
from ..startup import raise_on_ctrl_c
from . import figures
from .commands import Leave, complete, run_command
from .exits import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from .talk import Talk
from .typed import check_text, text_of

BANNER_ROWS = 6


def _begin(talk: Talk, *hints: str) -> None:
    first, *others = talk.banner()
    talk.screen.states([" | ".join((first, *hints)), *others], most_rows=BANNER_ROWS)
    if talk.args.session:
        for line in talk.load(talk.args.session, keeps_given=True):
            talk.screen.state(line)


# ---------------------------------------------------------------- a script


def script(talk: Talk) -> int:
    """One reply. Returns the exit code."""
    _begin(talk)
    text = talk.args.prompt if talk.args.prompt is not None else text_of(sys.stdin.buffer.read())
    if not text.strip():
        source = "--prompt" if talk.args.prompt is not None else "standard input"
        talk.screen.error(f"nothing to answer: {source} is empty")
        return EXIT_USAGE
    raise_on_ctrl_c()
    reply = talk.ask(text.strip())
    if talk.args.json:
        engine, stats = talk.engine, reply.stats
        told = {
            "text": reply.text,
            "thought": reply.thought,
            "finish_reason": reply.finish_reason or "interrupted",
            "model": engine.target_name,
            "drafter": engine.drafter_name,
            "speculation": engine.speculation_state,
            "notices": [in_flags(notice) for notice in (*engine.notices, *reply.notices)],
            "stats": figures.as_json(stats) if stats else None,
        }
        print(json.dumps(told, ensure_ascii=False), flush=True)
    return EXIT_OK if reply.finish_reason is not None else EXIT_INTERRUPTED


# ---------------------------------------------------------------- a person


def converse(talk: Talk) -> int:
    """One line after another, until the user leaves. Returns the exit code."""
    # Slow to import, and a script needs none.
    from .line_editor import LineEditor, history_path

    editor = LineEditor(complete, history=None if talk.args.no_history else history_path())
    talk.edit = editor.read
    _begin(talk, *filter(None, ("/help lists the commands", editor.notice)))
    raise_on_ctrl_c()
    was_stopped = False  # by Ctrl-C: the next one leaves
    while True:
        try:
            line = editor.read()
        except EOFError:
            break
        except KeyboardInterrupt:
            if was_stopped:
                break
            was_stopped = True
            talk.screen.state("Ctrl-C once more, or Ctrl-D, leaves")
            continue
        try:
            was_stopped = _take(talk, line)
        except Leave:
            break
    return EXIT_OK


def _take(talk: Talk, line: str) -> bool:
    """Carries out one line. True when Ctrl-C stopped it."""
    try:
        check_text(line, "what was typed")
        if line.startswith("/"):
            run_command(talk, line)
        elif line.strip():
            return talk.ask(line.strip()).finish_reason is None
    except (DsparkError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        talk.screen.error(in_flags(error))  # the conversation stays as it was before this line
    except EOFError:
        talk.screen.state("nothing is sent")
    except KeyboardInterrupt:
        talk.screen.state("stopped")
        return True
    return False
