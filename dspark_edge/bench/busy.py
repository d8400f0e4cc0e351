"""Whether other programs disturbed what was measured: ratios taken then mean little.

Two signs: processor time that others took meanwhile, and how far plain's own speeds lie apart,
which also shows what no process owns (a hot processor, a neighbour on the same host). Refuses to
know what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .summary import spread

OTHERS_SHARE_MAX = 0.05  # of all processors: 10 % of one of two cores
SPREAD_MAX = 0.10  # plain's quartiles apart, over the median


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
