"""What other programs take of the processors. Refuses to know what is measured meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # Linux counts a guest's time in user as well


@dataclass(slots=True, frozen=True)
class CpuSeconds:
    """Counters at one moment. total: of all processors and programs; ours: with our children."""

    at: float
    total: float
    ours: float


def read_cpu() -> CpuSeconds:
    """Time stolen by a virtual machine's host counts as taken by others."""
    times = psutil.cpu_times()
    total = sum(times) - sum(getattr(times, name, 0.0) for name in NOT_BUSY)
    me = psutil.Process()
    ours = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            own = process.cpu_times()
            # Of those that have ended meanwhile, where the system tells.
            ours += own.user + own.system + own.children_user + own.children_system
    return CpuSeconds(at=time.monotonic(), total=total, ours=ours)


class Others:
    """Counts what others take of the processors from now on."""

    def __init__(self, read: Callable[[], CpuSeconds] = read_cpu) -> None:
        self._read = read
        self._start = self._now()

    def share(self) -> float:
        """Of the time of all processors since then, 0 to 1; 0 where the system does not tell."""
        now, start = self._now(), self._start
        if now is None or start is None:
            return 0.0
        seconds = (now.at - start.at) * (os.cpu_count() or 1)
        taken = (now.total - start.total) - (now.ours - start.ours)
        return min(max(taken / seconds, 0.0), 1.0) if seconds > 0.0 else 0.0

    def _now(self) -> CpuSeconds | None:
        try:
            return self._read()
        except Exception:  # no /proc, or a guarded one: the system refuses in its own way
            return None
