"""Line charts as SVG text: the training curve's picture, which Markdown shows as it is.

Knows points, axes and colours. Refuses to know what they mean. By hand, because matplotlib would be
a dependency of a trainer that draws three panels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 300, 240  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 46, 38  # of its frame
COLOURS = ("#1f6feb", "#d1242f", "#2da44e")
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, times a power of ten
MAX_TICKS = 5
LINE = '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}"/>'
TEXT = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" fill="{}">{}</text>'


@dataclass(slots=True, kw_only=True)
class Series:
    """A line through points (x, y) with x > 0; is_dashed: what was not measured."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(slots=True, kw_only=True)
class Panel:
    """Series over one logarithmic x axis and one linear y axis."""

    title: str
    x_label: str
    series: Sequence[Series]


def svg(panels: Sequence[Panel]) -> str:
    """The panels side by side, each with at least one point. White behind: pages may be dark."""
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * WIDTH} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(slots=True)
class _Axes:
    """Where values stand in a panel."""

    x: tuple[float, float]  # decimal logarithms at the left and right edge
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        n_across, n_up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + across * n_across, HEIGHT - BOTTOM - up * n_up


def _panel(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    logs = [math.log10(x) for x, _ in points]
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    axes = _Axes(_widened(min(logs), max(logs)), (y_ticks[0], y_ticks[-1]))
    parts = [TEXT.format(LEFT, 16, "start", "black", f"<tspan>{escape(panel.title)}</tspan>")]
    for y in y_ticks:
        _, down = axes.place(10 ** axes.x[0], y)
        parts.append(LINE.format(LEFT, down, WIDTH - RIGHT, down, "#d0d7de"))
        parts.append(TEXT.format(LEFT - 4, down + 3, "end", "#57606a", f"{y:g}"))
    for x in _log_ticks(axes.x):
        across, _ = axes.place(x, y_ticks[0])
        parts.append(LINE.format(across, TOP, across, HEIGHT - BOTTOM, "#d0d7de"))
        parts.append(TEXT.format(across, HEIGHT - BOTTOM + 13, "middle", "#57606a", _short(x)))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(TEXT.format(middle, HEIGHT - 8, "middle", "#57606a", escape(panel.x_label)))
    across = LEFT
    for series, colour in zip(panel.series, COLOURS, strict=False):
        parts.append(_line(series, axes, colour))
        parts.append(TEXT.format(across, 34, "start", colour, escape(series.name)))
        across += 10 + 6 * len(series.name)
    return parts


def _line(series: Series, axes: _Axes, colour: str) -> str:
    places = " ".join("{:.1f},{:.1f}".format(*axes.place(x, y)) for x, y in series.points)
    dashes = ' stroke-dasharray="4 3"' if series.is_dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'


def _widened(low: float, high: float) -> tuple[float, float]:
    """Never empty: one point stands in the middle."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    low, high = _widened(low, high)
    rough = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in STEPS if each * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(edges: tuple[float, float]) -> list[float]:
    """1, 2 and 5 times powers of ten between the edges; of wide axes the powers alone."""
    factors = (1, 2, 5) if edges[1] - edges[0] < 2.0 else (1,)
    powers = range(math.floor(edges[0]), math.ceil(edges[1]) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [x for x in ticks if edges[0] <= math.log10(x) <= edges[1]]


def _short(x: float) -> str:
    """A count as people read it: 50k, 2M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= unit:
            return f"{x / unit:g}{letter}"
    return f"{x:g}"
