"""What to verify this round, and whether to draft at all.

Owns: the length choice (global maximum of tokens per second) and the park / probe / resume machine.
Refuses to know: models, tokens, clocks and contexts; numbers come in, decisions go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

PROBE_SMOOTHING = 0.5  # probes are rare, so each weighs more than a draft of a drafting phase
MAX_GAIN = 2.0  # one lucky draft must not outweigh many poor ones


@dataclass(slots=True, frozen=True)
class RoundPlan:
    """The lengths chosen for one round, with what they promise."""

    verify_lens: tuple[int, ...]
    batch_tokens: int
    expected_tokens: float
    expected_s: float

    @property
    def tps(self) -> float:
        """Expected tokens per second of the round (theta)."""
        return self.expected_tokens / self.expected_s


def choose_lengths(
    survival: Sequence[Sequence[float]],
    verify_s: Callable[[int], float],
    *,
    draft_s: float,
    other_s: float,
    max_batch_tokens: int,
    min_gain: float = 1.0,
) -> RoundPlan:
    """Pick each sequence's verify_len so that expected tokens per second is the highest possible.

    survival[r][k] is a_{k+1} of sequence r, in 0..1 and non-increasing (empty: nothing drafted).
    verify_s(B) is the time in seconds of a target pass over B tokens; it may have any shape.
    Among equally good plans the one with the fewest batch_tokens is returned. min_gain: how many
    times as fast as verifying nothing the best plan must promise to be, or nothing is verified:
    of many estimates the highest is the likeliest to be too high.

    For a given B the best admission is the B - R highest survivals, which is prefix-closed since
    survival never rises along a draft; so walking that order once visits the optimum of every B.
    Nothing stops the walk early: the cost curve is jagged, and the emission rule makes a search
    over all confidences exact (DSpark, arXiv 2607.05147, appendix A).

    Raises ValueError when there is no sequence, when the anchors alone exceed max_batch_tokens,
    when a survival is outside 0..1 or rises, and when a round would take no time.
    """
    n_seq = len(survival)
    if n_seq == 0:
        raise ValueError("survival has 0 sequences but a round needs at least 1")
    if max_batch_tokens < n_seq:
        raise ValueError(
            f"{n_seq} anchors do not fit in max_batch_tokens {max_batch_tokens}; "
            "raise it or run fewer sequences"
        )
    order = _admission_order(survival)
    n_room = min(len(order), max_batch_tokens - n_seq)
    fixed_s = draft_s + other_s

    expected_tokens = float(n_seq)
    best_tokens, best_s, n_best = expected_tokens, _round_s(verify_s(n_seq), fixed_s), 0
    nothing_s = best_s
    for n_admitted in range(1, n_room + 1):
        expected_tokens -= order[n_admitted - 1][0]  # the order holds -survival
        expected_s = _round_s(verify_s(n_seq + n_admitted), fixed_s)
        # theta > best theta, without the division: both times are positive.
        if expected_tokens * best_s > best_tokens * expected_s:
            best_tokens, best_s, n_best = expected_tokens, expected_s, n_admitted

    if best_tokens * nothing_s < min_gain * n_seq * best_s:
        best_tokens, best_s, n_best = float(n_seq), nothing_s, 0
    verify_lens = [0] * n_seq
    for _, _, r in order[:n_best]:
        verify_lens[r] += 1
    return RoundPlan(
        verify_lens=tuple(verify_lens),
        batch_tokens=n_seq + n_best,
        expected_tokens=best_tokens,
        expected_s=best_s,
    )


def _admission_order(survival: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All draft tokens as (-survival, position, sequence), most certain first."""
    order: list[tuple[float, int, int]] = []
    for r, row in enumerate(survival):
        ceiling = 1.0
        for k, a in enumerate(row):
            if not 0.0 <= a <= ceiling:
                raise ValueError(
                    f"survival {a} at position {k} of sequence {r} is outside 0..{ceiling}; "
                    "it must be a running product of probabilities"
                )
            ceiling = a
            order.append((-a, k, r))
    order.sort()  # ties: the earlier position first, so that every prefix stays closed
    return order


def _round_s(verify_s: float, fixed_s: float) -> float:
    round_s = fixed_s + verify_s
    if not 0.0 < round_s < math.inf:
        raise ValueError(f"a round of {round_s} s cannot be ranked; times must be finite, above 0")
    return round_s


@dataclass(slots=True)
class Parking:
    """Decides whether drafting pays: drafts, parks, probes at a fixed cadence, resumes.

    The state follows a mean of the gains observed (drafted over other tokens per second). It parks
    when the mean is below `park_below` by more than its standard error, never on fewer than
    `min_drafts` drafts since drafting began, and resumes when the mean passes `resume_above`; the
    gap keeps it from flapping. Parked, one round in `probe_every` drafts: fixed, for a growing
    pause would wedge it. The mean is of gains, not of their logarithms: total tokens over total
    time is what the user feels.

    Raises ValueError when made with a cadence below 1 or with thresholds that cross.
    """

    probe_every: int = 32
    min_drafts: int = 8
    park_below: float = 1.0
    resume_above: float = 1.03
    smoothing: float = 1 / 64
    state: Literal["drafting", "parked"] = field(default="drafting", init=False)
    n_drafts: int = field(default=0, init=False)
    mean_gain: float = field(default=1.0, init=False)
    _variance: float = field(default=0.0, init=False, repr=False)
    _n_rounds_parked: int = field(default=0, init=False, repr=False)
    _n_trial_drafts: int = field(default=0, init=False, repr=False)
    _is_probe: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.probe_every < 1 or self.min_drafts < 1:
            raise ValueError(
                f"probe_every {self.probe_every} and min_drafts {self.min_drafts} "
                "must be at least 1"
            )
        if self.park_below > self.resume_above:
            raise ValueError(
                f"park_below {self.park_below} is above resume_above {self.resume_above}; "
                "it would park and resume on the same gain"
            )
        if not 0.0 < self.smoothing <= 1.0:
            raise ValueError(f"smoothing {self.smoothing} is outside 0..1")

    @property
    def is_probe(self) -> bool:
        """Whether the draft of this round only asks if drafting would pay again."""
        return self._is_probe

    @property
    def reason(self) -> str:
        """Why it drafts or is parked, in words for the chat, /health and the statistics."""
        if self.state == "drafting" and self._n_trial_drafts < self.min_drafts:
            return f"drafting: on trial ({self._n_trial_drafts} of {self.min_drafts} drafts)"
        # Gains count up to MAX_GAIN, so while drafting the mean is a lower bound.
        promise = "drafting promises" if self.state == "parked" else "promises at least"
        return (
            f"{self.state}: {promise} {self.mean_gain:.2f}x of plain decoding "
            f"({self.n_drafts} drafts measured)"
        )

    def wants_draft(self) -> bool:
        """Whether this round should draft; call it once per round that could."""
        if self.state == "drafting":
            self._is_probe = False
            return True
        self._n_rounds_parked += 1
        self._is_probe = self._n_rounds_parked % self.probe_every == 0
        return self._is_probe

    def observe(self, gain: float, n_drafts: int = 1) -> None:
        """Take the gain of one drafted round: drafted over plain tokens per second, at least 0.

        n_drafts: sequences drafted for. Raises ValueError for a negative gain, or no draft.
        """
        if not gain >= 0.0 or n_drafts < 1:
            raise ValueError(f"gain {gain} of {n_drafts} drafts is not a ratio of two speeds")
        self.n_drafts += n_drafts
        if self.state == "drafting":
            self._n_trial_drafts += n_drafts
            # A plain mean over the first drafts of a drafting phase, which owe nothing to the past.
            weight = min(1.0, n_drafts * max(self.smoothing, 1.0 / self._n_trial_drafts))
        else:
            weight = PROBE_SMOOTHING
        difference = min(gain, MAX_GAIN) - self.mean_gain
        self.mean_gain += weight * difference
        self._variance = (1.0 - weight) * (self._variance + weight * difference * difference)
        self._decide()

    def _decide(self) -> None:
        if self.state == "parked":
            if self.mean_gain > self.resume_above:
                self.state, self._n_trial_drafts, self._variance = "drafting", 0, 0.0
        elif self._n_trial_drafts >= self.min_drafts:
            # A hopeless drafter's gains hardly vary and park it at once; where they vary, a mean of
            # few says little, and parking a drafter that pays costs more than a longer trial.
            n_effective = min(self._n_trial_drafts, 1.0 / self.smoothing)
            if self.mean_gain + math.sqrt(self._variance / n_effective) < self.park_below:
                self.state, self._n_rounds_parked = "parked", 0
