"""What a pass costs on this machine: measured, and corrected while running.

Owns: the cost table and its profile. Refuses to know: models and contexts (it is given functions
that run a pass), files, and what is decided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .cost_curve import Curve

FORMAT_VERSION = 1
DEPTH_STEP = 512  # tokens in a bucket of depth
LOAD_WEIGHT = 0.2  # how far one pass moves the load of the machine, in ratio
SHAPE_WEIGHT = 0.05  # and the entry of its size: what makes one size slow makes mostly all slow
DRAFT_LOAD_WEIGHT = 0.05  # a draft pass varies with what it injects: it tells less of the load
OUTLIER_RATIO = 2.0  # an observation counts as at most this much slower or faster
MIN_S = 1e-9
MAX_S = 3600.0  # of a pass in a file; with more, what is extrapolated could be infinite
MAX_SIZE = 2**31  # of a key in a file
SCALING_PASSES = 5  # that a bucket of depth takes to find its level after a leap to it
SMALL_STEP = 1.1  # to a new depth, in ratio: more is a leap
DRIFT_MAX = 1.4  # of the load: with more, most of what it gains is not the depth's
PROFILE_PASSES = 5
BUSY_RATIO = 1.5  # of the median to the fastest pass, above which a profile is not kept


class CostTable:
    """Seconds of a target pass by batch_tokens and depth, of a draft pass by sequences, and rest.

    Measured, never modelled: a staircase stays a staircase, and a wider pass may be cheaper. Other
    programs slow passes of all sizes alike, the ones that do not run just now included: that is
    kept apart, as one factor, so that a busy moment does not bend the curve.
    other_s: own time per round, in seconds, without draws: their time goes with emitted tokens, so
    it favours no plan. is_noisy: its passes took now more, now less.
    """

    WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)

    __slots__ = ("_deepest", "_draft", "_load", "_n_scaled", "_verify", "is_noisy", "other_s")

    def __init__(
        self,
        *,
        verify: Mapping[int, Mapping[int, float]] | None = None,
        draft: Mapping[int, float] | None = None,
        other_s: float = 0.0,
    ) -> None:
        """verify: depth bucket -> batch_tokens -> seconds. draft: sequences -> seconds.

        Raises ValueError when a time is negative or not finite.
        """
        self._verify = {b: _checked_curve(c) for b, c in (verify or {}).items()}
        self._draft = _checked_curve(draft or {})
        self._n_scaled: dict[int, int] = {}  # observations of buckets that began as a guess
        self._load = 1.0  # present over profiled times
        self._deepest = DEPTH_STEP * max(self._verify, default=0)  # tokens behind a pass, so far
        self.other_s = other_s  # 0: not measured yet
        self.is_noisy = False

    def verify_s(self, batch_tokens: int, depth: int) -> float:
        """Seconds of a target pass over batch_tokens, with `depth` tokens in the cache.

        Linear between measured widths, the last slope beyond them; a bucket of depth without data
        costs what the nearest measured one does. Raises ValueError when nothing is measured.
        """
        if not self._verify:
            raise ValueError("cost table is empty; profile() it or observe a pass first")
        curve = self._verify.get(depth // DEPTH_STEP)
        if curve is None:
            curve = self._verify[self._nearest(_bucket(depth))]
        return self._load * curve.at(batch_tokens)

    def draft_s(self, n_seq: int) -> float:
        """Seconds of a draft pass over n_seq sequences; 0 when drafts need no pass."""
        return self._load * self._draft.at(n_seq) if self._draft else 0.0

    @property
    def widest(self) -> int:
        """The widest pass that was measured; 0: none was."""
        return max((curve.widest for curve in self._verify.values()), default=0)

    @property
    def load(self) -> float:
        """How much slower passes are now than when profiled, growth with depth left out."""
        return self._load

    def observe_verify(self, batch_tokens: int, depth: int, seconds: float) -> None:
        """Correct the table by one target pass that ran.

        A bucket of depth without data begins as a copy of the nearest one; after a leap to it the
        first observations scale it by what they show, as a running mean. Raises ValueError when
        seconds is negative or not finite.
        """
        seconds, bucket = _checked_s(seconds), _bucket(depth)
        if not self._verify:
            self._verify[bucket] = Curve({batch_tokens: seconds})
            return
        ratio = _ratio(seconds, self.verify_s(batch_tokens, depth))
        step = (depth + DEPTH_STEP) / (self._deepest + DEPTH_STEP)
        self._deepest = max(self._deepest, depth)
        if bucket not in self._verify:
            self._verify[bucket] = self._verify[self._nearest(bucket)].copy()
            if not 1.0 < step <= SMALL_STEP:
                self._n_scaled[bucket] = 0
        if self._n_scaled.get(bucket, SCALING_PASSES) < SCALING_PASSES:
            self._n_scaled[bucket] += 1
            self._verify[bucket].scale(ratio ** (1.0 / self._n_scaled[bucket]))
            return
        _correct(self._verify[bucket], batch_tokens, ratio)
        self._load *= ratio**LOAD_WEIGHT
        if step > 1.0:
            self._move_drift(self._verify[bucket], step)

    def observe_draft(self, n_seq: int, seconds: float) -> None:
        """Correct the table by one draft pass. Raises ValueError as observe_verify does."""
        seconds = _checked_s(seconds)
        if not self._draft:
            self._draft.put(n_seq, seconds / self._load)
            return
        ratio = _ratio(seconds, self.draft_s(n_seq))
        _correct(self._draft, n_seq, ratio)
        self._load *= ratio**DRAFT_LOAD_WEIGHT

    def observe_other(self, seconds: float) -> None:
        """Correct the own time per round. Raises ValueError as observe_verify does."""
        seconds = _checked_s(seconds)
        if self.other_s > 0.0:
            self.other_s *= _ratio(seconds, self.other_s) ** LOAD_WEIGHT
        else:
            self.other_s = seconds

    def to_json(self) -> dict[str, object]:
        """A plain dict that json can write: what passes cost now, the load of the machine in it."""
        return {
            "version": FORMAT_VERSION,
            "verify": {str(b): self._with_load(c) for b, c in sorted(self._verify.items())},
            "draft": self._with_load(self._draft),
            "other_s": self.other_s,
        }

    @classmethod
    def from_json(cls, data: object) -> CostTable:
        """The table that to_json() wrote. Raises ValueError when malformed or another version."""
        if not isinstance(data, dict) or data.keys() != {"version", "verify", "draft", "other_s"}:
            raise ValueError(
                "cost table must have version, verify, draft, other_s; profile it anew"
            )
        if data["version"] != FORMAT_VERSION:
            raise ValueError(
                f"cost table has version {data['version']} but {FORMAT_VERSION} is read; "
                "profile it anew"
            )
        if not isinstance(data["verify"], dict) or not data["verify"]:
            raise ValueError("cost table has no verify curves; profile it anew")
        return cls(
            verify={
                _integer(b, minimum=0): _curve_from_json(c, "verify")
                for b, c in data["verify"].items()
            },
            draft=_curve_from_json(data["draft"], "draft", may_be_empty=True),
            other_s=_number(data["other_s"], "other_s"),
        )

    def _move_drift(self, curve: Curve, step: float) -> None:
        """Take for the new depth's own what the load has drifted by; step: to it, in ratio.

        Depth slows passes little by little, at most in proportion; other programs do it at once.
        """
        most = step if self._load <= DRIFT_MAX else math.sqrt(step)
        drift = min(max(self._load, 1.0 / most), most)
        self._load /= drift
        curve.scale(drift)

    def _with_load(self, curve: Curve) -> dict[str, float]:
        return {str(size): self._load * seconds for size, seconds in curve}

    def _nearest(self, bucket: int) -> int:
        if bucket in self._verify:
            return bucket
        return min(self._verify, key=lambda b: (abs(b - bucket), b))


def profile(
    time_step: Callable[[int, int], float],
    time_draft: Callable[[int], float] | None,
    *,
    max_width: int,
    n_seq: int,
    depth: int,
    budget_s: float = 3.0,
) -> CostTable:
    """Measure a cost table: the fastest of up to 5 passes per size, after one that is not counted.

    The fastest, since other programs only ever add time, and on a busy machine add most of it.

    time_step(n_tokens, depth) and time_draft(n_seq) run one pass and return its seconds; time_draft
    is None when drafts need no pass. Repeats are interleaved, so that a slow moment of the machine
    spreads over all sizes. Sweeps stop before budget_s seconds of passes are exceeded, though never
    before the first. Raises ValueError when max_width or n_seq is below 1.
    """
    if max_width < 1 or n_seq < 1:
        raise ValueError(f"max_width {max_width} and n_seq {n_seq} must be at least 1")
    passes: list[tuple[str, int, Callable[[], float]]] = [
        ("verify", width, partial(time_step, width, depth)) for width in _sizes(max_width)
    ]
    if time_draft is not None:
        passes += [("draft", n, partial(time_draft, n)) for n in _sizes(n_seq)]

    spent_s = sum(_checked_s(run()) for _, _, run in passes)
    measured: list[list[float]] = [[] for _ in passes]
    for _ in range(PROFILE_PASSES):
        sweep_s = 0.0
        for seconds, (_, _, run) in zip(measured, passes, strict=True):
            seconds.append(_checked_s(run()))
            sweep_s += seconds[-1]
        spent_s += sweep_s
        if spent_s + sweep_s > budget_s:
            break

    curves: dict[str, dict[int, float]] = {"verify": {}, "draft": {}}
    for seconds, (kind, size, _) in zip(measured, passes, strict=True):
        curves[kind][size] = min(seconds)
    table = CostTable(verify={_bucket(depth): curves["verify"]}, draft=curves["draft"])
    table.is_noisy = any(statistics.median(s) > BUSY_RATIO * min(s) for s in measured)
    return table


def _sizes(largest: int) -> list[int]:
    """The widths up to `largest`, which is always among them."""
    return [width for width in CostTable.WIDTHS if width < largest] + [largest]


def _bucket(depth: int) -> int:
    return max(depth, 0) // DEPTH_STEP


def _correct(curve: Curve, size: int, ratio: float) -> None:
    """Move the point of `size`, made when missing, a little towards what was observed."""
    curve.put(size, curve.at(size) * ratio**SHAPE_WEIGHT)


def _ratio(seconds: float, present: float) -> float:
    return min(max(seconds / present, 1.0 / OUTLIER_RATIO), OUTLIER_RATIO)


def _checked_s(seconds: float) -> float:
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"a pass of {seconds} s is not a time; it must be finite and at least 0")
    return max(seconds, MIN_S)


def _checked_curve(curve: Mapping[int, float]) -> Curve:
    return Curve({size: _checked_s(seconds) for size, seconds in curve.items()})


def _curve_from_json(data: object, name: str, *, may_be_empty: bool = False) -> dict[int, float]:
    if not isinstance(data, dict) or not (data or may_be_empty):
        raise ValueError(f"cost table's {name} holds no seconds by size; profile it anew")
    curve = {_integer(size, minimum=1): _number(s, name) for size, s in data.items()}
    if 0.0 in curve.values():
        raise ValueError(f"cost table's {name} holds a pass of 0 s; profile it anew")
    return curve


def _integer(text: object, *, minimum: int) -> int:
    if not isinstance(text, str) or not text.isdecimal() or str(int(text)) != text:
        raise ValueError(f"cost table has the key {text!r} where a number belongs; profile it anew")
    if not minimum <= int(text) <= MAX_SIZE:
        raise ValueError(
            f"cost table has the key {text[:20]} outside {minimum}..{MAX_SIZE}; profile it anew"
        )
    return int(text)


def _number(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_S:
        raise ValueError(f"cost table's {name} has {value!r} s; profile it anew")
    return float(value)
