"""Counts of everything that went through the server; /stats and /metrics read the same ones.

Owns sums and the last minute, second by second. Refuses to know how they are shown.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .jobs import Piece

TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
VERIFY_LEN_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
RECENT_S = 60
SMOOTHING = 1 / 16


@dataclass(slots=True)
class Second:
    """What happened within one second of the clock.

    decode_s: in rounds. plain_s: what the same tokens would have taken without drafts, as far as
    that was seen; n_compared: tokens that it tells of.
    """

    at_s: int
    n_tokens: int = 0
    n_rounds: int = 0  # of sequences: two that share a pass count two
    n_drafted: int = 0
    n_verified: int = 0
    n_accepted: int = 0
    decode_s: float = 0.0
    n_compared: int = 0
    plain_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """Since the server has started. requests: those that ask for text, by outcome; responses:
    all that the server gave, by status."""

    clock: Callable[[], float] = time.time
    requests: Counter[str] = field(default_factory=Counter)
    responses: Counter[int] = field(default_factory=Counter)
    n_prompt_tokens: int = 0
    n_reused_tokens: int = 0
    n_tokens: int = 0
    n_rounds: int = 0
    n_drafted: int = 0
    n_verified: int = 0
    n_accepted: int = 0
    verify_lens: Counter[int] = field(default_factory=Counter)
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))
    ttft_sum_s: float = 0.0
    request_s: float = 0.0
    decode_s: float = 0.0
    parked_s: float = 0.0
    is_parked: Callable[[], bool] = lambda: False
    recent: deque[Second] = field(default_factory=lambda: deque(maxlen=RECENT_S))
    plain_round_s: dict[int, float] = field(default_factory=dict)  # by sequences in the pass

    def observe_round(self, pieces: Sequence[Piece]) -> None:
        """What one round gave, a piece for each sequence in it."""
        second = self._second()
        round_s = 0.0
        for piece in pieces:
            if not piece.token_ids:
                continue
            n_tokens, round_s = len(piece.token_ids), max(round_s, piece.round_s)
            self.n_tokens += n_tokens
            self.n_rounds += 1
            self.n_drafted += piece.n_drafted
            self.n_verified += piece.n_verified
            self.n_accepted += piece.n_accepted
            self.verify_lens[piece.n_verified] += 1
            second.n_tokens += n_tokens
            second.n_rounds += 1
            second.n_drafted += piece.n_drafted
            second.n_verified += piece.n_verified
            second.n_accepted += piece.n_accepted
        self.decode_s += round_s
        if self.is_parked():
            self.parked_s += round_s
        if round_s > 0.0 and not any(p.n_drafted or p.n_verified for p in pieces):
            before_s = self.plain_round_s.get(len(pieces), round_s)
            self.plain_round_s[len(pieces)] = before_s + SMOOTHING * (round_s - before_s)
        second.decode_s += round_s
        plain_s = self.plain_round_s.get(len(pieces))
        if plain_s is not None:
            n_tokens = sum(len(piece.token_ids) for piece in pieces)
            second.n_compared += n_tokens
            second.plain_s += n_tokens * plain_s / len(pieces)

    def observe_prompt(self, piece: Piece) -> None:
        """The first piece of a reply: what its prompt took."""
        self.n_prompt_tokens += piece.stats.n_prompt
        self.n_reused_tokens += piece.stats.n_reused
        self.ttft_counts[bisect.bisect_left(TTFT_BUCKETS_S, piece.stats.ttft_s)] += 1
        self.ttft_sum_s += piece.stats.ttft_s

    def observe_response(self, status: int) -> None:
        """One HTTP request, of whatever kind, was answered."""
        self.responses[status] += 1

    def observe_end(self, outcome: str, took_s: float) -> None:
        """One request for text has ended. outcome: ok, cancelled, or the status of its error."""
        self.requests[outcome] += 1
        if outcome == "ok":
            self.request_s += took_s

    def mean_request_s(self, default: float) -> float:
        """Seconds that an answered request has taken; the default before there was one."""
        n = self.requests["ok"]
        return self.request_s / n if n else default

    def to_json(self) -> dict[str, Any]:
        """For user interfaces."""
        return {
            "requests": dict(self.requests),
            "n_prompt_tokens": self.n_prompt_tokens,
            "n_reused_tokens": self.n_reused_tokens,
            "n_tokens": self.n_tokens,
            "n_rounds": self.n_rounds,
            "n_drafted": self.n_drafted,
            "n_verified": self.n_verified,
            "n_accepted": self.n_accepted,
            "tau": round(self.n_tokens / self.n_rounds, 3) if self.n_rounds else None,
            "verify_lens": {str(n): count for n, count in sorted(self.verify_lens.items())},
            "decode_s": round(self.decode_s, 3),
            "parked_s": round(self.parked_s, 3),
            "tps": round(self.n_tokens / self.decode_s, 2) if self.decode_s else None,
            "plain_tps": {
                str(n): round(n / round_s, 2) for n, round_s in sorted(self.plain_round_s.items())
            },
            "at_s": int(self.clock()),
            "recent": [asdict(second) for second in self.recent],
        }

    def _second(self) -> Second:
        now_s = int(self.clock())
        if not self.recent or self.recent[-1].at_s != now_s:
            self.recent.append(Second(now_s))
        return self.recent[-1]


class Collector:
    """The totals in Prometheus' form. gauges: name and help to the value now. pressure: which
    steps of pressure.py are in force."""

    def __init__(
        self,
        totals: Totals,
        gauges: Callable[[], dict[tuple[str, str], float]],
        pressure: Callable[[], dict[str, bool]],
    ) -> None:
        self._totals = totals
        self._gauges = gauges
        self._pressure = pressure

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        totals = self._totals
        requests = CounterMetricFamily(
            "dspark_requests", "requests for text that could be read", labels=["outcome"]
        )
        for outcome, count in totals.requests.items():
            requests.add_metric([outcome], count)
        yield requests
        responses = CounterMetricFamily(
            "dspark_responses", "HTTP responses, refusals included", labels=["status"]
        )
        for status, count in totals.responses.items():
            responses.add_metric([str(status)], count)
        yield responses
        for name, text, value in (
            ("prompt_tokens", "prompt tokens", totals.n_prompt_tokens),
            ("reused_tokens", "prompt tokens found in a cache", totals.n_reused_tokens),
            ("tokens", "emitted tokens", totals.n_tokens),
            ("rounds", "rounds, counted for each sequence", totals.n_rounds),
            ("drafted_tokens", "draft tokens proposed", totals.n_drafted),
            ("verified_tokens", "draft tokens sent to the target", totals.n_verified),
            ("accepted_tokens", "draft tokens accepted", totals.n_accepted),
            ("decode_seconds", "time in rounds", totals.decode_s),
            ("parked_seconds", "of those, with drafting parked", totals.parked_s),
        ):
            yield CounterMetricFamily(f"dspark_{name}", text, value=value)
        yield _histogram(
            "dspark_verify_len",
            "draft tokens verified for one sequence in one round",
            _in_buckets(totals.verify_lens, VERIFY_LEN_BUCKETS),
            total=totals.n_verified,
        )
        yield _histogram(
            "dspark_ttft_seconds",
            "time to the first token",
            list(zip((*TTFT_BUCKETS_S, float("inf")), totals.ttft_counts, strict=True)),
            total=totals.ttft_sum_s,
        )
        for (name, text), gauge in self._gauges().items():
            yield GaugeMetricFamily(f"dspark_{name}", text, value=gauge)
        pressure = GaugeMetricFamily(
            "dspark_pressure", "1 while this is given up under pressure", labels=["step"]
        )
        for step, is_taken in self._pressure().items():
            pressure.add_metric([step], float(is_taken))
        yield pressure


def _in_buckets(counts: Counter[int], bounds: Sequence[int]) -> list[tuple[float, int]]:
    sums = [0] * (len(bounds) + 1)
    for value, count in counts.items():
        sums[bisect.bisect_left(bounds, value)] += count
    return list(zip((*map(float, bounds), float("inf")), sums, strict=True))


def _histogram(
    name: str, text: str, counts: Sequence[tuple[float, int]], *, total: float
) -> HistogramMetricFamily:
    buckets: list[tuple[str, float]] = []
    n = 0
    for bound, count in counts:
        n += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(n)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)
