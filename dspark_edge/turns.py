"""Whose turn it is: one thread runs rounds, others come in between two of them, none waits long.

Refuses to know what is done in a turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import DecodeError


class Turns:
    """The two locks of an engine."""

    __slots__ = ("_round", "_state", "_worker")

    def __init__(self) -> None:
        self._round = threading.Lock()  # held by the thread that runs a round
        self._state = threading.Lock()  # held by it too, and shortly by those that abort or add
        self._worker: int | None = None  # the thread that has the first

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A round, or work on the caches. Raises DecodeError while another thread is at it."""
        if not self._round.acquire(blocking=False):
            raise DecodeError("the engine is in use by another thread; take turns")
        try:
            self._worker = threading.get_ident()
            with self._state:
                yield
        finally:
            self._worker = None
            self._round.release()

    @contextmanager
    def after_the_round(self) -> Iterator[None]:
        """Waits for the end of the round that runs; none begins before this block's end.

        Raises DecodeError amid a round of the caller's own thread, e.g. in a signal handler.
        """
        if self._worker == threading.get_ident():
            raise DecodeError("a round of this very thread is running; call this behind it")
        with self._state:
            yield

    @contextmanager
    def if_between_rounds(self) -> Iterator[bool]:
        """Whether no round runs: then none begins before this block's end. Never waits.

        So it may be asked by the garbage collector, in the middle of the thread's own round.
        """
        is_between = self._state.acquire(blocking=False)
        try:
            yield is_between
        finally:
            if is_between:
                self._state.release()
