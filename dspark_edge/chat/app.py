"""The chat's entry: reads the arguments, picks a script or a person, and says what fails.

Imports what is slow only behind the arguments. Refuses to know what a chat does (run.py).
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from ..arguments import in_flags
from ..errors import DsparkError
from .exits import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from .options import parser
from .screen import Screen
from .typed import check_text


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
            # Seconds of importing, which --help and a wrong argument need not wait for.
            from .run import converse, script
            from .talk import Talk

            talk = Talk(args, screen)
            try:
                return script(talk) if is_script else converse(talk)
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
