"""Holds Ctrl-C back while something must not be left half done.

Refuses to know what that is.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Uninterrupted:
    """A block that SIGINT does not break; one that came meanwhile takes effect at its end.

    Only Python's main thread gets signals, and only a Python handler can be held back: elsewhere
    this does nothing.
    """

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler: object = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        handler = self._handler
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if self._came is not None:
                handler(*self._came)
