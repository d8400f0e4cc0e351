"""How far survival estimates can be believed: calibration error, log loss, reliability table.

Owns: the measures. Refuses to know models and engines: it judges estimates against what the text
said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from .calibration import Decided, Recording, Replay
from .confidence import SurvivalModel
from .signals import DraftSignals

Array = npt.NDArray[np.float64]

N_BINS = 10  # of equal mass
LOG_LOSS_EDGE = 1e-6


@dataclass(slots=True)
class Reliability:
    """Estimates against outcomes. Bins hold equally many estimates, lowest first.

    ece: mean over bins of |mean estimate - share that came true|. ece_of_chance: what `ece` would
    be on average if the estimates were exact and the outcomes independent; blocks overlap, so the
    true floor is higher. table: (mean estimate, share, count) of each bin.
    """

    n: int
    ece: float
    ece_of_chance: float
    log_loss: float
    mean_estimate: float
    share: float
    table: list[tuple[float, float, int]]

    def to_json(self) -> dict[str, object]:
        """A plain dict that json can write."""
        return {name: getattr(self, name) for name in self.__slots__}


def reliability(estimates: Sequence[float], came_true: Sequence[bool]) -> Reliability:
    """Judge estimates; a run of equal ones is split by the order given.

    Raises ValueError for none at all or unequal lengths.
    """
    if not 0 < len(estimates) == len(came_true):
        raise ValueError(
            f"{len(estimates)} estimates of {len(came_true)} outcomes cannot be judged"
        )
    p, y = np.array(estimates, dtype=np.float64), np.array(came_true, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    bins = [part for part in np.array_split(order, N_BINS) if len(part)]
    clipped = np.clip(p, LOG_LOSS_EDGE, 1.0 - LOG_LOSS_EDGE)
    return Reliability(
        n=len(p),
        ece=float(sum(abs(p[part].sum() - y[part].sum()) for part in bins) / len(p)),
        # The mean distance of a sum of coin flips from its mean.
        ece_of_chance=float(
            sum(math.sqrt(2.0 / math.pi * (p[part] * (1.0 - p[part])).sum()) for part in bins)
            / len(p)
        ),
        log_loss=float(-np.mean(y * np.log(clipped) + (1.0 - y) * np.log(1.0 - clipped))),
        mean_estimate=float(p.mean()),
        share=float(y.mean()),
        table=[(float(p[part].mean()), float(y[part].mean()), len(part)) for part in bins],
    )


@dataclass(slots=True)
class Judgement:
    """Survival of whole blocks: over all positions together, and of each position."""

    survival: Reliability
    by_position: list[Reliability]

    def to_json(self) -> dict[str, object]:
        """A plain dict that json can write."""
        return {
            "survival": self.survival.to_json(),
            "by_position": [each.to_json() for each in self.by_position],
        }


def judge_head(recordings: Sequence[Recording]) -> Judgement | None:
    """The confidence head as it is: survival is the product of c_k. None without a head."""
    if any(draft.confidence is None for r in recordings for draft in r.drafts if draft.tokens):
        return None
    return _judge([(_head_survival(b.signals), b) for r in recordings for b in _drafted(r)])


def judge(
    model: SurvivalModel,
    recordings: Sequence[Recording],
    *,
    online: bool,
    of_lookup: bool = False,
) -> Judgement:
    """The model's survival estimates, each made from what was known when its block was drafted.

    online: the model goes on learning from the recordings, one after the other. of_lookup: judge
    its proposals instead of the drafter's. Raises ValueError when the recordings decide nothing.
    """
    pairs: list[tuple[list[float], Decided]] = []
    for recording in recordings:
        estimates: dict[int, list[float]] = {}
        for offered, decided in Replay(recording, model):
            for signals in offered:
                if signals.tokens:
                    estimates[id(signals)] = model.survival(signals)
            for block in decided:
                estimate = estimates.pop(id(block.signals))
                if _is_lookup(block) == of_lookup:
                    pairs.append((estimate, block))
                if online:
                    model.observe(block.signals, block.n_correct, block.n_seen)
    return _judge(pairs)


def _drafted(recording: Recording) -> list[Decided]:
    return [b for _, decided in Replay(recording) for b in decided if not _is_lookup(b)]


def _is_lookup(block: Decided) -> bool:
    return block.signals.match_len > 0


def _head_survival(signals: DraftSignals) -> list[float]:
    return list(accumulate(signals.confidence or [], mul))


def _judge(pairs: Sequence[tuple[Sequence[float], Decided]]) -> Judgement:
    estimates: list[list[float]] = []
    survived: list[list[bool]] = []
    for survival, block in pairs:
        was_wrong = block.n_correct < block.n_seen  # then all later tokens fell with it
        n_known = len(survival) if was_wrong else block.n_seen
        for slot in range(n_known):
            if slot == len(estimates):
                estimates.append([])
                survived.append([])
            estimates[slot].append(survival[slot])
            survived[slot].append(slot < block.n_correct)
    return Judgement(
        survival=reliability(
            [a for row in estimates for a in row], [s for row in survived for s in row]
        ),
        by_position=[reliability(a, s) for a, s in zip(estimates, survived, strict=True)],
    )
