"""The plot of bench run: speeds with their spread, what rounds cost, acceptance by position.

Of the bench run files the only one that imports matplotlib. Takes a report, knows no engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost import CostTable
from ..errors import DsparkError
from .output import check_place
from .ratios import ALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEPTH = 256  # tokens in the cache at which the cost table is drawn
TABLE = "#9aa5b1"


def check_plot(path: Path | None) -> None:
    """Find out before a long run whether its plot can be written. None: none is asked for.

    Raises DsparkError when matplotlib is missing, ValueError on an ending it does not write or a
    place that takes no file.
    """
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise DsparkError(
            "--plot needs matplotlib, which is not installed; pip install 'dspark-edge[plot]'"
        ) from error
    endings = FigureCanvasAgg.filetypes
    if path.suffix.lstrip(".") not in endings:
        raise ValueError(f"--plot is {path}; its ending must be one of {', '.join(endings)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot is {path}, whose folder is missing; make it first")
    check_place("--plot", path)


def plot_cost(report: dict[str, Any], path: Path) -> None:
    """Draw the table of `bench profile`: a target pass by batch_tokens, and by the token.

    Raises as check_plot does.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    passes, by_token = figure.subplots(1, 2)
    for curve in report["table"]["verify"].values():
        widths = [int(width) for width in curve]
        times = [1e3 * seconds for seconds in curve.values()]
        passes.plot(widths, times, "o-", label="target pass")
        each = [time / width for time, width in zip(times, widths, strict=True)]
        by_token.plot(widths, each, "o-")
    for n_seq, seconds in report["table"]["draft"].items():
        passes.axhline(1e3 * seconds, color=TABLE, label=f"draft pass, {n_seq} sequence(s)")
    for axes, label in ((passes, "ms of a pass"), (by_token, "ms by token of the pass")):
        axes.set(xlabel="batch_tokens", ylabel=label)
        axes.set_ylim(bottom=0.0)
    passes.legend(fontsize=8)
    figure.suptitle(report["name"])
    figure.savefig(path)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a report into a file whose ending says the format.

    Raises as check_plot does.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    lines = report["modes"]
    colors = {mode: f"C{i}" for i, mode in enumerate(dict.fromkeys(x["mode"] for x in lines))}
    figure = Figure(figsize=(11, 11), layout="constrained")
    speeds, cost, acceptance = figure.subplots(3, 1)
    _draw_speeds(speeds, lines, colors)
    _draw_cost(cost, report, colors)
    _draw_acceptance(acceptance, lines, colors)
    figure.suptitle(f"{report['target']}, {report['drafter']}, {report['machine']['cpu']}")
    figure.savefig(path)


def _draw_speeds(axes: Axes, lines: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Median tokens per second; the whiskers are the quartiles, above them the ratio to plain."""
    cells = list(dict.fromkeys((line["prompts"], line["sequences"]) for line in lines))
    width = 0.8 / len(colors)
    for index, (mode, color) in enumerate(colors.items()):
        own = [line for line in lines if line["mode"] == mode]
        shift = (index - (len(colors) - 1) / 2) * width
        places = [cells.index((line["prompts"], line["sequences"])) + shift for line in own]
        heights = [line["decode_tps"] for line in own]
        below = [line["decode_tps"] - line["decode_tps_quartiles"][0] for line in own]
        above = [line["decode_tps_quartiles"][1] - line["decode_tps"] for line in own]
        error = [below, above]
        axes.bar(places, heights, width, yerr=error, capsize=2, color=color, label=mode)
        for place, line in zip(places, own, strict=True):
            if line["ratio_to_plain"] is not None:
                text, top = f"{line['ratio_to_plain']:.2f}", line["decode_tps_quartiles"][1]
                axes.annotate(text, (place, top), ha="center", va="bottom", fontsize=7)
    names = [f"{prompts}, {sequences}" for prompts, sequences in cells]
    axes.set_xticks(range(len(cells)), names)
    axes.set(ylabel="tokens per second", title="Decoding (prompts, sequences; numbers: x plain)")
    axes.margins(y=0.15)
    axes.legend(fontsize=8, ncols=len(colors), loc="upper center")


def _draw_cost(axes: Axes, report: dict[str, Any], colors: dict[str, str]) -> None:
    """Milliseconds of a round by batch_tokens; the areas say how often a mode chose it."""
    lines = [line for line in report["modes"] if line["prompts"] != ALL]
    if report["cost"] is not None:
        table = CostTable.from_json(report["cost"])
        most = max(int(width) for line in lines for width in line["rounds_by_batch_tokens"])
        widths = range(1, most + 1)
        times = [1e3 * table.verify_s(width, DEPTH) for width in widths]
        label = f"target pass by cost table, depth {DEPTH}"
        axes.plot(list(widths), times, ".-", color=TABLE, label=label)
    for line in lines:
        rounds = line["rounds_by_batch_tokens"]
        total = sum(each["n"] for each in rounds.values())
        axes.scatter(
            [int(width) for width in rounds],
            [each["median_ms"] for each in rounds.values()],
            s=[10 + 300 * each["n"] / total for each in rounds.values()],
            color=colors[line["mode"]],
            alpha=0.6,
        )
    axes.set(xlabel="batch_tokens", ylabel="ms of a round", title="Cost and what was chosen")
    axes.set_ylim(bottom=0.0)
    axes.locator_params(axis="x", integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _draw_acceptance(axes: Axes, lines: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Share of right draft tokens among those verified, all prompts, the first sequence count."""
    prompts, sequences = lines[-1]["prompts"], lines[0]["sequences"]
    for line in lines:
        rates = [each["rate"] for each in line["acceptance_by_position"]]
        shown = [(i, rate) for i, rate in enumerate(rates, start=1) if rate is not None]
        if shown and (line["prompts"], line["sequences"]) == (prompts, sequences):
            positions, shares = zip(*shown, strict=True)
            axes.plot(positions, shares, "o-", color=colors[line["mode"]], label=line["mode"])
    title = f"Acceptance where verified ({prompts}, {sequences} sequence(s))"
    axes.set(xlabel="draft position", ylabel="share right", ylim=(0, 1.02), title=title)
    axes.locator_params(axis="x", integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
