"""Decides between one reply to a script and a conversation in a terminal, and runs it.

Replies go to stdout, everything else to stderr. Refuses to know how decoding works.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Sequence

from ..arguments import in_flags
from ..errors import DsparkError
from . import figures
from .commands import Leave, complete, run_command
from .line_editor import LineEditor, history_path
from .options import parser
from .screen import Screen
from .talk import Talk
from .typed import check_text, text_of

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for our errors, 2 for wrong arguments, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    if sys.stdin is None or sys.stdout is None:
        print(
            "error: standard input or output is closed; open it or use /dev/null", file=sys.stderr
        )
        return EXIT_ERROR
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what this locale has no character for
    screen = Screen()
    is_script = args.prompt is not None or not sys.stdin.isatty()
    if args.json and not is_script:
        screen.error("--json wants --prompt TEXT, or a prompt on standard input")
        return EXIT_USAGE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: screen.state(f"warning: {message}")
            for name in ("prompt", "system"):
                check_text(getattr(args, name) or "", f"--{name}")
            talk = Talk(args, screen)
            try:
                return _script(talk) if is_script else _converse(talk)
            finally:
                talk.close()
    except (DsparkError, ValueError) as error:
        screen.error(in_flags(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _output_lost(screen, error)


def _output_lost(screen: Screen, error: OSError) -> int:
    """Nobody reads the reply any more, or the disk is full: say it once, and close quietly."""
    if not isinstance(error, BrokenPipeError):
        screen.error(error)
    # Python would try to flush the rest at exit and complain a second time.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_ERROR


def _begin(talk: Talk, *hints: str) -> None:
    first, *others = talk.banner()
    for line in (" | ".join((first, *hints)), *others):
        talk.screen.state(line)
    if talk.args.session:
        for line in talk.load(talk.args.session, keeps_given=True):
            talk.screen.state(line)


# ---------------------------------------------------------------- a script


def _script(talk: Talk) -> int:
    """One reply."""
    _begin(talk)
    text = talk.args.prompt if talk.args.prompt is not None else text_of(sys.stdin.buffer.read())
    if not text.strip():
        source = "--prompt" if talk.args.prompt is not None else "standard input"
        talk.screen.error(f"nothing to answer: {source} is empty")
        return EXIT_USAGE
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
            "notices": [in_flags(notice) for notice in engine.notices],
            "stats": figures.as_json(stats) if stats else None,
        }
        print(json.dumps(told, ensure_ascii=False), flush=True)
    return EXIT_OK if reply.finish_reason is not None else EXIT_INTERRUPTED


# ---------------------------------------------------------------- a person


def _converse(talk: Talk) -> int:
    """One line after another, until the user leaves."""
    editor = LineEditor(complete, history=None if talk.args.no_history else history_path())
    talk.edit = editor.read
    _begin(talk, *filter(None, ("/help lists the commands", editor.notice)))
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
