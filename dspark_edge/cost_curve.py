"""Seconds of a pass by its size: a curve of measured points, read between and beyond them.

Refuses to know what the sizes count, and how a curve is corrected (cost.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping


class Curve:
    """Measured sizes in rising order, and the seconds of each.

    Kept sorted, not sorted when asked: to choose lengths for 16 sequences takes hundreds of looks.
    """

    __slots__ = ("_seconds", "_sizes")

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = [points[size] for size in self._sizes]

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Sizes with their seconds, in rising order."""
        return zip(self._sizes, self._seconds, strict=True)

    @property
    def widest(self) -> int:
        """The largest size. Raises IndexError when there is none."""
        return self._sizes[-1]

    def copy(self) -> Curve:
        """A curve of its own with the same points."""
        return Curve(dict(self))

    def at(self, size: int) -> float:
        """Seconds at `size`: linear between points, the last slope beyond them.

        Below the first point, its seconds. Raises IndexError when there are no points.
        """
        sizes, seconds = self._sizes, self._seconds
        right = bisect_left(sizes, size)
        is_beyond = right == len(sizes)
        if not is_beyond and (right == 0 or sizes[right] == size):
            return seconds[right]
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]  # one point has no slope: cost per token
        high = right - 1 if is_beyond else right
        low = high - 1
        slope = (seconds[high] - seconds[low]) / (sizes[high] - sizes[low])
        if is_beyond:  # falling on would reach 0
            return seconds[high] + (slope if slope > 0.0 else 0.0) * (size - sizes[high])
        return seconds[low] + slope * (size - sizes[low])

    def put(self, size: int, seconds: float) -> None:
        """Set the point at `size`, made when missing."""
        at = bisect_left(self._sizes, size)
        if at < len(self._sizes) and self._sizes[at] == size:
            self._seconds[at] = seconds
        else:
            self._seconds.insert(at, seconds)
            self._sizes.insert(at, size)

    def scale(self, ratio: float) -> None:
        """Multiply the seconds of all points."""
        self._seconds = [seconds * ratio for seconds in self._seconds]
