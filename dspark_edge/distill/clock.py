"""The time that a run may take, over all its starts, and what it says of the time left.

Refuses to know what is done in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..files import write_atomically

SAY_EVERY_S = 30.0


class Clock:
    """Counts the seconds of this run and of earlier ones that it goes on from."""

    def __init__(
        self, path: Path, total_s: float, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """path: where the time spent is kept. total_s: of all runs together. now: in seconds."""
        self.total_s = total_s
        self._path = path
        self._before_s = _read(path)
        self._now = now
        self._start = now()
        self._said = -SAY_EVERY_S

    @property
    def spent_s(self) -> float:
        """Seconds so far."""
        return self._before_s + self._now() - self._start

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until `share` of the time is used up; negative beyond it."""
        return share * self.total_s - self.spent_s

    def save(self) -> None:
        """Keep the time spent, for a run that goes on from here."""
        write_atomically(self._path, json.dumps({"spent_s": self.spent_s}))

    def say(self, text: str, *, share: float | None = None) -> None:
        """A line for people, with the time left until `share`; those with one at intervals only."""
        if share is None:
            print(f"{_clock(self.spent_s)}  {text}", file=sys.stderr, flush=True)
            return
        if self.spent_s - self._said < SAY_EVERY_S:
            return
        self._said = self.spent_s
        left = f"stage {_clock(self.left_s(share))}, all {_clock(self.left_s())} left"
        print(f"{_clock(self.spent_s)}  {text} ({left})", file=sys.stderr, flush=True)


class Pieces:
    """Work until `share` of a clock's time that is done in pieces: one that would end too late,
    were it as long as the longest so far, is not begun. Once it is over it stays so."""

    def __init__(self, clock: Clock, share: float, *, longest_s: float = 0.0) -> None:
        """longest_s: of pieces like these that were done before."""
        self.longest_s = longest_s
        self._clock = clock
        self._share = share
        self._asked_s: float | None = None

    def is_over(self) -> bool:
        """Ask in front of each piece; the time between two questions is a piece's."""
        spent_s = self._clock.spent_s
        if self._asked_s is not None:
            self.longest_s = max(self.longest_s, spent_s - self._asked_s)
        self._asked_s = spent_s
        return self._clock.left_s(self._share) <= self.longest_s


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _read(path: Path) -> float:
    try:
        spent = json.loads(path.read_text(encoding="utf-8"))["spent_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return float(spent) if isinstance(spent, int | float) else 0.0
