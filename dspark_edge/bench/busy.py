"""Whether other programs disturbed what was measured: ratios taken then mean little.

Two signs: processor time that others took meanwhile, and how far plain's own speeds lie apart,
which also shows what no process owns (a hot processor, a neighbour on the same host). Refuses to
know what is measured.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

from .summary import spread

OTHERS_SHARE_MAX = 0.05  # of all processors: 10 % of one of two cores
SPREAD_MAX = 0.10  # plain's quartiles apart, over the median
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
        self._start = read()

    def share(self) -> float:
        """Of the time of all processors since then, 0 to 1."""
        now, start = self._read(), self._start
        seconds = (now.at - start.at) * (os.cpu_count() or 1)
        taken = (now.total - start.total) - (now.ours - start.ours)
        return min(max(taken / seconds, 0.0), 1.0) if seconds > 0.0 else 0.0


def busy_reason(others_share: float | None, plain_speeds: Iterable[Sequence[float]]) -> str | None:
    """What makes the figures doubtful; None: nothing.

    others_share: None where what is measured is itself somebody else's process. plain_speeds: by
    repeat, for each row.
    """
    reasons = []
    if others_share is not None and others_share > OTHERS_SHARE_MAX:
        reasons.append(
            f"other programs took {others_share:.0%} of the processors "
            f"(up to {OTHERS_SHARE_MAX:.0%} is quiet)"
        )
    widest = max(map(_quartiles_apart, plain_speeds), default=0.0)
    if widest > SPREAD_MAX:
        reasons.append(
            f"plain's own speeds lie {widest:.0%} apart (up to {SPREAD_MAX:.0%} is quiet)"
        )
    return " and ".join(reasons) or None


def _quartiles_apart(speeds: Sequence[float]) -> float:
    median = statistics.median(speeds) if speeds else 0.0
    if median <= 0.0:
        return 0.0
    low, high = spread(speeds)["quartiles"]
    return float(high - low) / median


def caveat(reason: str) -> str:
    """The line that belongs under every table of such a run."""
    return f"CAVEAT: the machine was busy: {reason}; measure again when it is quiet"
