"""How much of each draft to verify this round: the global maximum of tokens per second.

Refuses to know: models, tokens, clocks and contexts; numbers come in, decisions go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Costs(Protocol):
    """The part of a CostTable that decides."""

    @property
    def other_s(self) -> float: ...
    def verify_s(self, batch_tokens: int, depth: int) -> float: ...
    def draft_s(self, n_seq: int) -> float: ...


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
    nothing_s = fixed_s + verify_s(n_seq)
    if not 0.0 < nothing_s < math.inf:
        raise _unrankable(nothing_s)
    best_tokens, best_s, n_best = expected_tokens, nothing_s, 0
    for n_admitted, (minus_survival, _, _) in enumerate(order[:n_room], start=1):
        expected_tokens -= minus_survival
        expected_s = fixed_s + verify_s(n_seq + n_admitted)
        if not 0.0 < expected_s < math.inf:
            raise _unrankable(expected_s)
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


def _unrankable(round_s: float) -> ValueError:
    return ValueError(f"a round of {round_s} s cannot be ranked; times must be finite, above 0")
