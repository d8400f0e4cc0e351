"""From runs to figures: speeds, ratios pair by pair, acceptance.

A pair is what two modes did in one repeat, run by run in turn. Refuses to know engines.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .measure import GroupRun


@dataclass(slots=True, frozen=True)
class Key:
    """What the runs of one row have in common."""

    sequences: int
    prompts: str
    mode: str


Repeats = list[list[GroupRun]]  # by repeat, then by group


def decode_tps(runs: Sequence[GroupRun]) -> float:
    """Tokens per second over several runs together; 0 when no clock ran."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.n_tokens for run in runs) / seconds if seconds > 0.0 else 0.0


def pair_ratios(one: Repeats, other: Repeats) -> list[float]:
    """Speed of one over speed of the other, repeat by repeat."""
    pairs = [(decode_tps(a), decode_tps(b)) for a, b in zip(one, other, strict=True)]
    return [a / b for a, b in pairs if a > 0.0 and b > 0.0]  # 0: no clock ran


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves; None where there is none."""
    if not values:
        return {"median": None, "quartiles": None, "values": []}
    low, high = np.percentile(values, [25, 75])
    return {
        "median": statistics.median(values),
        "quartiles": [float(low), float(high)],
        "values": list(values),
    }


def row(key: Key, repeats: Repeats, plain: Repeats | None) -> dict[str, Any]:
    """The figures of one mode on one set of prompts."""
    runs = [run for repeat in repeats for run in repeat]
    stats = [each for run in runs for each in run.stats]
    n_rounds = sum(each.n_rounds for each in stats)
    speeds = spread([tps for tps in map(decode_tps, repeats) if tps > 0.0])
    ratios = spread([] if plain is None else pair_ratios(repeats, plain))
    return {
        "mode": key.mode,
        "sequences": key.sequences,
        "prompts": key.prompts,
        "decode_tps": speeds["median"],
        "decode_tps_quartiles": speeds["quartiles"],
        "decode_tps_by_repeat": speeds["values"],
        "ratio_to_plain": ratios["median"],
        "ratio_quartiles": ratios["quartiles"],
        "ratio_by_repeat": ratios["values"],
        "ratio_by_group": [] if plain is None else _by_group(repeats, plain),
        "tau": sum(each.n_tokens for each in stats) / n_rounds if n_rounds else 0.0,
        "acceptance_by_position": acceptance(runs),
        "ttft_s": statistics.median(each.ttft_s for each in stats),
        "own_ms_per_round": 1e3 * sum(s.own_s for s in stats) / n_rounds if n_rounds else 0.0,
        "n_tokens": sum(run.n_tokens for run in repeats[0]),
        "joules_per_token": _joules_per_token(runs),
        "rounds_by_batch_tokens": rounds_by_batch_tokens(runs),
    }


def _by_group(repeats: Repeats, plain: Repeats) -> list[float]:
    """Median ratio to plain of each group of prompts: how much prompts differ."""
    groups = zip(zip(*repeats, strict=True), zip(*plain, strict=True), strict=True)
    ratios = [pair_ratios([[a] for a in ours], [[b] for b in theirs]) for ours, theirs in groups]
    return [statistics.median(each) for each in ratios if each]


def acceptance(runs: Sequence[GroupRun]) -> list[dict[str, Any]]:
    """Per draft position: how many were verified after right ones only, and the share right."""
    n_positions = max(len(run.positions) for run in runs)
    table = []
    for position in range(n_positions):
        counts = [run.positions[position] for run in runs if position < len(run.positions)]
        n_right, n_judged = (sum(column) for column in zip(*counts, strict=True))
        rate = n_right / n_judged if n_judged else None
        table.append({"n_right": n_right, "n": n_judged, "rate": rate})
    return table


def rounds_by_batch_tokens(runs: Sequence[GroupRun]) -> dict[str, dict[str, float]]:
    """How often a pass had each width, and the median milliseconds of such a round."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for each in run.rounds:
            seconds[each.batch_tokens].append(each.seconds)
    return {
        str(width): {"n": len(times), "median_ms": 1e3 * statistics.median(times)}
        for width, times in sorted(seconds.items())
    }


def _joules_per_token(runs: Sequence[GroupRun]) -> float | None:
    joules = [run.joules for run in runs if run.joules is not None]
    n_tokens = sum(run.n_tokens for run in runs if run.joules is not None)
    return sum(joules) / n_tokens if n_tokens else None
