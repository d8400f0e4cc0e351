"""What more data would bring: the training curve's last part as a line, drawn out further.

An extrapolation, and its error. Refuses to know how the curve is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .train import Point

MIN_POINTS = 4  # of a line whose error means something


@dataclass(slots=True, frozen=True, kw_only=True)
class Outlook:
    """Least squares of greedy tau - 1 against log2(anchors). slope: tokens per round that a
    doubling of the anchors gave, slope_error its standard error; n_points: that the line is fit to,
    the first at from_anchors, the last at n_anchors."""

    slope: float
    slope_error: float
    n_points: int
    from_anchors: int
    n_anchors: int
    centre: float  # mean of log2(anchors)
    level: float  # of the line at the centre
    level_error: float

    def gained_at(self, n_anchors: float) -> tuple[float, float]:
        """The line's tau - 1 after so many anchors, and its standard error."""
        away = math.log2(n_anchors) - self.centre
        return self.level + self.slope * away, math.hypot(self.level_error, self.slope_error * away)


def outlook(curve: Sequence[Point]) -> Outlook | None:
    """From the second half of the curve's points; None where they are too few, or one place."""
    points = curve[len(curve) // 2 :]
    n = len(points)
    x = [math.log2(point.n_anchors) for point in points]
    y = [point.greedy_tau - 1.0 for point in points]
    centre, level = sum(x) / max(1, n), sum(y) / max(1, n)
    spread = sum((each - centre) ** 2 for each in x)
    if n < MIN_POINTS or spread == 0.0:
        return None
    slope = sum((a - centre) * (b - level) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - level - slope * (a - centre)) ** 2 for a, b in zip(x, y, strict=True))
    variance = rest / (n - 2)  # two numbers are fit
    return Outlook(
        slope=slope,
        slope_error=math.sqrt(variance / spread),
        n_points=n,
        from_anchors=points[0].n_anchors,
        n_anchors=points[-1].n_anchors,
        centre=centre,
        level=level,
        level_error=math.sqrt(variance / n),
    )
