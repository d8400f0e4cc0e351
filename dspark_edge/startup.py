"""Lets Ctrl-C end a command quietly while it starts and while it closes.

Importing and loading take seconds, a traceback tells nothing then, and there is nothing to keep.
Refuses to know the commands.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def end_on_ctrl_c() -> None:
    """From now on Ctrl-C ends the process at once, with code 130 and no word.

    Does nothing where Ctrl-C is ignored already, as behind nohup. Main thread only.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_ctrl_c() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again; for who is ready to catch it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    # An exception would get lost, or print a traceback, inside of an import or a callback.
    os._exit(EXIT_INTERRUPTED)
