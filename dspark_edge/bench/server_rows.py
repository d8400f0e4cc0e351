"""The rows of bench server: what clients got from a server by number of clients and mode.

A pair is what both servers did in one repeat. Refuses to know how batches were run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .server_clients import Batch
from .summary import spread

PLAIN = "plain"


@dataclass(slots=True, frozen=True)
class Place:
    """What the batches of one row have in common."""

    clients: int
    mode: str


Batches: TypeAlias = Mapping[Place, Sequence[Batch]]  # by repeat


def rows_of(batches: Batches, prompts: str) -> list[dict[str, Any]]:
    """One for each place. prompts: their sets' names."""
    return [
        _row(place, own, batches[Place(place.clients, PLAIN)]) | {"prompts": prompts}
        for place, own in batches.items()
    ]


def _row(place: Place, own: Sequence[Batch], plain: Sequence[Batch]) -> dict[str, Any]:
    answers = [answer for batch in own for answer in batch.answers]
    stats = [answer.stats for answer in answers]
    total, full = ([b.total_tps for b in own], [b.full_tps for b in own])
    waits = [_waits(batch) for batch in own]
    plain_waits = [_waits(batch) for batch in plain]
    return {
        "mode": place.mode,
        "clients": place.clients,
        "n_requests": len(own[0].answers),
        "n_tokens": sum(answer.n_tokens for answer in own[0].answers),
        **_figure("total_tps", total),
        **_figure("full_tps", full),
        **_figure("ratio_to_plain", _ratios(total, [b.total_tps for b in plain])),
        **_figure("full_ratio_to_plain", _ratios(full, [b.full_tps for b in plain])),
        "ttft_s": statistics.median(wait for each in waits for wait in each),
        "ttft_p95_s": _p95([wait for each in waits for wait in each]),
        **_figure("ttft_ratio_to_plain", _ratios(*_each(statistics.median, waits, plain_waits))),
        **_figure("ttft_p95_ratio_to_plain", _ratios(*_each(_p95, waits, plain_waits))),
        "tau": sum(s["n_tokens"] for s in stats) / max(sum(s["n_rounds"] for s in stats), 1),
        # Of prompts' tokens: such as all prompts of a template begin with.
        "reused_share": sum(s["n_reused"] for s in stats) / sum(s["n_prompt"] for s in stats),
    }


def _figure(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Median, quartiles and what each repeat gave."""
    found = spread([value for value in values if value is not None])
    return {
        name: found["median"],
        f"{name}_quartiles": found["quartiles"],
        f"{name}_by_repeat": found["values"],
    }


def _ratios(own: Sequence[float | None], plain: Sequence[float | None]) -> list[float]:
    """Repeat by repeat, where both have a figure."""
    return [a / b for a, b in zip(own, plain, strict=True) if a is not None and b]


def _waits(batch: Batch) -> list[float]:
    """Seconds from each request to its first token."""
    return [answer.first_at - answer.asked_at for answer in batch.answers]


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95))


def _each(
    of: Any, own: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]
) -> tuple[list[float], list[float]]:
    return [of(values) for values in own], [of(values) for values in plain]
