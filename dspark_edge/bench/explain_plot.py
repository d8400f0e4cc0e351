"""The plot of bench explain: block use over time, and the cost curve with the chosen points.

Of bench explain the only file that imports matplotlib.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cost import CostTable
from ..errors import DsparkError
from ..trace import Trace, TraceRound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCEPTED, REJECTED, BONUS, EVENT = "#2a9d5c", "#d1495b", "#9aa5b1", "#e9a400"
MAX_BARS = 400  # rounds are averaged in groups beyond that


def plot(trace: Trace, path: Path) -> None:
    """Draw the trace into a file whose ending says the format.

    Raises DsparkError when matplotlib is missing, ValueError on an ending it does not write.
    """
    draw(trace).savefig(path)


def draw(trace: Trace) -> Figure:
    """Block use over time above, costs below. Raises DsparkError when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DsparkError(
            "--plot needs matplotlib, which is not installed; pip install 'dspark-edge[plot]'"
        ) from error
    figure = Figure(figsize=(11, 8), layout="constrained")
    over_time, curve = figure.subplots(2, 1)
    _draw_block_use(over_time, trace)
    _draw_cost(curve, trace)
    figure.suptitle(f"{trace.header.target}, {trace.header.drafter}")
    return figure


def _draw_block_use(axes: Axes, trace: Trace) -> None:
    """Stacked per round: the bonus tokens, the accepted, the rejected; parked stretches shaded."""
    size = -(-len(trace.rounds) // MAX_BARS)
    groups = [trace.rounds[i : i + size] for i in range(0, len(trace.rounds), size)]
    starts = [group[0].t_s for group in groups]
    ends = [*starts[1:], groups[-1][-1].t_s + groups[-1][-1].measured_s]
    widths = [max(end - start, 0.0) for start, end in zip(starts, ends, strict=True)]
    bonus = [_mean(group, "bonus") for group in groups]
    accepted = [_mean(group, "accepted") for group in groups]
    rejected = [_mean(group, "rejected") for group in groups]
    gained = [b + a for b, a in zip(bonus, accepted, strict=True)]
    for heights, bottoms, color, label in (
        (bonus, [0.0] * len(groups), BONUS, "bonus"),
        (accepted, bonus, ACCEPTED, "accepted"),
        (rejected, gained, REJECTED, "rejected"),
    ):
        axes.bar(starts, heights, widths, bottom=bottoms, align="edge", color=color, label=label)
    for group, start, end in zip(groups, starts, ends, strict=True):
        if group[0].state.startswith("parked"):
            axes.axvspan(start, end, color=BONUS, alpha=0.2, linewidth=0)
    _draw_events(axes, trace)
    axes.set(xlabel="seconds", ylabel="tokens per round", title="Block use (shaded: parked)")
    axes.legend(loc="upper right")


def _draw_events(axes: Axes, trace: Trace) -> None:
    for event in trace.events:
        axes.axvline(event.t_s, color=EVENT, linestyle="--")
        axes.annotate(
            event.text[:40],
            (event.t_s, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            fontsize=7,
        )


def _mean(group: Sequence[TraceRound], what: str) -> float:
    """Mean over the group's rounds of bonus, accepted or rejected tokens."""
    total = 0
    for line in group:
        for s in line.sequences:
            total += {
                "bonus": 1,
                "accepted": s.n_accepted,
                "rejected": s.verify_len - s.n_accepted,
            }[what]
    return total / len(group)


def _draw_cost(axes: Axes, trace: Trace) -> None:
    """Milliseconds of a target pass by batch_tokens: the table, the rounds, the chosen points.

    Both are time inside llama.cpp; a trace from before that was kept has rounds with draws in them.
    """
    rounds = trace.rounds
    chosen = Counter(line.batch_tokens for line in rounds)
    if trace.header.cost is not None:
        table = CostTable.from_json(trace.header.cost)
        depth = int(statistics.median(line.depth for line in rounds))
        widths = range(1, max(*chosen, 8) + 1)
        times = [1e3 * table.verify_s(b, depth) for b in widths]
        axes.plot(
            list(widths), times, ".-", color=BONUS, label=f"cost table at the start, depth {depth}"
        )
    medians = {
        b: 1e3 * statistics.median(_pass_s(line) for line in rounds if line.batch_tokens == b)
        for b in chosen
    }
    has_draws = any(line.pass_s is None for line in rounds)
    axes.scatter(
        list(medians),
        list(medians.values()),
        s=[20 + 600 * chosen[b] / len(rounds) for b in medians],
        color=ACCEPTED,
        alpha=0.7,
        label=f"median of rounds{', with draws' if has_draws else ''}; area: how often chosen",
    )
    axes.set(xlabel="batch_tokens", ylabel="ms of a target pass", title="Cost and what was chosen")
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="upper left")


def _pass_s(line: TraceRound) -> float:
    return line.verify_s if line.pass_s is None else line.pass_s
