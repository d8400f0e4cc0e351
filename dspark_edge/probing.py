"""When a parked drafter is asked again, and what the drafts of recent requests promised.

Refuses to know: gains, models and clocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .cost import OUTLIER_RATIO
from .scheduler import Costs

PROBE_COST = 0.005  # share of plain decoding that probes may cost while parked
PROBE_EVERY = 32  # rounds; at least
PROBE_EVERY_MAX = 512  # rounds, unless a draft alone is so dear: an injection must not wedge it
PROBE_SMOOTHING = 0.5
PRICE_ROUNDS = 16  # the cost of passes moves slowly
PROBE_DRAFTS = 2  # in a row: the injection before the first costs as much as several drafts
NEWCOMER_ROUNDS = 4  # that a new request decodes before it is probed: its first token never waits

N_REQUESTS = 4  # whose drafts are remembered, ...
N_ROWS = 16  # ... the last ones of each
N_CALIBRATED = 4  # requests that an offline calibration stands for

Row = Sequence[float]  # a_1.. of one block, as far as there is room for it; empty: no block


@dataclass(slots=True)
class Probes:
    """While parked, one probe in every `every` rounds, PROBE_DRAFTS drafts of one sequence each.

    A sequence that has not been drafted for may have its probe one period early: requests differ
    more from each other than the parts of one, and what is learnt early serves longest.
    """

    every: int = PROBE_EVERY
    _saved: int = 0  # rounds without a draft that no probe has used up; below 0: borrowed
    _n_left: int = 0  # drafts of the probe that runs
    _n_seq: int = 0
    _key: Hashable = None
    _n_probes: int = 0

    @property
    def is_first(self) -> bool:
        """Whether the draft asked for last comes after a gap."""
        return self._n_left == PROBE_DRAFTS - 1

    @property
    def is_last(self) -> bool:
        """Whether it completes a probe."""
        return self._n_left == 0

    def wants(self, keys: Sequence[Hashable], newcomer: int | None) -> int | None:
        """The index of the sequence to draft for in this parked round, if any.

        newcomer: of one that has not been drafted for, None where there is none.
        """
        if self._n_left and self._n_seq == len(keys) and self._key in keys:
            self._n_left -= 1
            return keys.index(self._key)
        self._n_left = 0
        self._saved = min(self._saved + 1, self.every)
        if self._saved < (self.every if newcomer is None else 0):
            return None
        self._saved -= self.every
        self._n_left = PROBE_DRAFTS - 1
        self._n_probes += 1
        r = self._n_probes % len(keys) if newcomer is None else newcomer
        self._n_seq, self._key = len(keys), keys[r]
        return r


class ProbePrice:
    """What probes cost here, and so how often they may be. Times in seconds."""

    __slots__ = ("_costs", "_every", "_first_s", "_n_asked")

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._first_s = 0.0  # of a draft of one sequence, with the injection before it
        self._every: dict[tuple[int, int], int] = {}
        self._n_asked = 0

    def observe(self, draft_s: float, n_seq: int, n_drafts: int, n_behind: int) -> None:
        """Take a draft of n_drafts sequences, of n_seq that run, that began with an injection for
        n_behind of them.
        """
        injection_s = max(draft_s - self._costs.draft_s(n_drafts), 0.0) / max(n_behind, 1)
        first_s = injection_s + self._costs.draft_s(1)
        most_s = PROBE_EVERY_MAX * self._paid_s(n_seq)
        if self._first_s == 0.0:
            self._first_s = min(first_s, most_s)
        # One slow moment must not count whole: it would be long before probes correct it.
        most_s = min(most_s, OUTLIER_RATIO * self._first_s)
        self._first_s += PROBE_SMOOTHING * (min(first_s, most_s) - self._first_s)
        self._every.clear()

    def every(self, n_seq: int, n_drafts: int) -> int:
        """Rounds between probes of n_drafts in a row, so that they cost at most PROBE_COST.

        Every round asks, and this code runs cold: the answer counts for PRICE_ROUNDS.
        """
        self._n_asked += 1
        if self._n_asked % PRICE_ROUNDS == 0:
            self._every.clear()
        place = (n_seq, n_drafts)
        if place not in self._every:
            self._every[place] = self._rounds_between(n_seq, n_drafts)
        return self._every[place]

    def _rounds_between(self, n_seq: int, n_drafts: int) -> int:
        paid_s, draft_s = self._paid_s(n_seq), self._costs.draft_s(1)
        first_s = max(min(self._first_s, PROBE_EVERY_MAX * paid_s), draft_s)
        probe_s = first_s + (n_drafts - 1) * draft_s
        return max(PROBE_EVERY, math.ceil(probe_s / paid_s))

    def _paid_s(self, n_seq: int) -> float:
        """Seconds of probing that one round without a draft pays for."""
        return PROBE_COST * self._costs.verify_s(n_seq, 0)


@dataclass(slots=True)
class BlockHistory:
    """Blocks of the last few requests: what drafting usually promises to the next one.

    Every request counts about alike, for one that drafts all the time would drown the others.
    """

    typical: Sequence[Row] = ()  # rows of an offline calibration
    is_live: bool = field(default=False, init=False)  # whether it holds more than those
    _rows: dict[Hashable, deque[Row]] = field(default_factory=dict, init=False)
    _ended: list[Hashable] = field(default_factory=list, init=False)  # whose rows they are, oldest

    def __post_init__(self) -> None:
        n = min(len(self.typical), N_CALIBRATED * N_ROWS)
        chosen = [self.typical[i * len(self.typical) // n] for i in range(n)]
        for i in range(min(n, N_CALIBRATED)):
            name = f"calibration {i}"
            self._rows[name] = deque(chosen[i::N_CALIBRATED], maxlen=N_ROWS)
            self._ended.append(name)

    def add(self, key: Hashable, row: Row) -> None:
        """Take one more block of a request."""
        self.is_live = True
        self._rows.setdefault(key, deque(maxlen=N_ROWS)).append(row)

    def finish(self, key: Hashable) -> None:
        """The request has ended: it is forgotten after N_REQUESTS others."""
        if key in self._rows:
            self._ended.append(key)
            if len(self._ended) > N_REQUESTS:
                del self._rows[self._ended.pop(0)]

    def rows(self) -> list[Row]:
        """All that are remembered."""
        return [row for rows in self._rows.values() for row in rows]
