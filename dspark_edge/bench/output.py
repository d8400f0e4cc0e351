"""Where a report goes: stdout first, then the files that were asked for.

A file that fails takes nothing of the rest. Refuses to know what is in a report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .shared import say


def check_place(flag: str, path: Path | None) -> None:
    """Find out before a long run whether a file can be written there. None: none is asked for.

    Raises ValueError naming the flag.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} is {path}, which is a folder; give a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{flag} is {path}, but nothing can be written into {above}")


def deliver(report: dict[str, Any] | str, args: argparse.Namespace) -> bool:
    """Prints a report, then writes --json and --plot; False when one of them failed.

    args.draw: what --plot is drawn with, of the commands that draw their report.
    """
    if isinstance(report, str):
        return _print(report)
    is_done = _print(json.dumps(report))
    if getattr(args, "json", None) is not None:
        is_done &= _write_json(report, args.json)
    if "draw" in args and args.plot is not None:
        is_done &= _draw(report, args)
    return is_done


def _print(text: str) -> bool:
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whoever stopped reading knows that
            say(f"error: the report cannot be written to stdout: {error}")
        # Python would complain again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _write_json(report: dict[str, Any], path: Path) -> bool:
    if write_atomically(path, json.dumps(report) + "\n"):
        return True
    say(f"error: --json {path} cannot be written; the report is on stdout only")
    return False


def _draw(report: dict[str, Any], args: argparse.Namespace) -> bool:
    try:
        args.draw(report, args.plot)
    except OSError as error:
        say(f"error: --plot {args.plot} cannot be written: {error}")
        return False
    say(f"plotted to {args.plot}")
    return True
