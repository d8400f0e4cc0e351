"""From a draft's signals to survival: what each of its tokens has to be believed.

Owns: what the calibration of confidence per position starts from, and its form as JSON.
Refuses to know: how it is applied and learns (csrc/survival_model.h), and the cost of anything.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from ._core import SurvivalNumbers
from .ledger import RECENT_SMOOTHING, RECENT_START
from .signals import FEATURES

# 0.7: heads are over-confident. The certainty of a draw says more than a head. What lookup says of
# the same place (the last three): as in a fit to SmolLM2's replies to our calibration prompts.
DRAFTER_PRIOR = (0.0, 0.7, 0.5, 0.8, 0.5, 1.2, -0.8, 0.7)
# Bias by slot, then one weight each: from fits to the same replies, at temperatures 0, 0.7 and 1.
# What a match is worth depends on the text more than on the model.
LOOKUP_BIASES = (-2.3, -1.8, -1.6, -1.4)
LOOKUP_PRIOR = (3.4, 0.9, 0.1, 0.3, 1.0, -0.8, 0.4, 0.2, 0.3)
CACHED_BIASES = (-2.5, -2.4)
CACHED_PRIOR = (2.5, 0.8, 0.1, 0.0, 1.3, -1.7, 0.6, 0.8, 0.2)
PRIOR_PRECISION = 1.0  # of a weight; what is forgotten never falls below it
LOOKUP_PRECISION = 20.0  # of their priors, which are fits

SURVIVAL_FLOOR = 0.02  # below it no token has ever been worth its place in a pass
FORMAT_VERSION = 2


class SurvivalModel(SurvivalNumbers):
    """Per-position logistic calibration of a draft's signals, offline fit and online learning.

    Before any data a head's confidence is believed with scepticism, and a drafter without a head
    is right about half the time per slot. What runs once a round, and the numbers, are the core's:
    survival, against, observe, features.
    """

    __slots__ = ()

    def __init__(self, n_slots: int) -> None:
        """n_slots: longest draft in tokens. Raises ValueError when below 1."""
        if n_slots < 1:
            raise ValueError(f"n_slots {n_slots} is below 1; pass the drafter's block_size")
        super().__init__(
            [prior(slot) for slot in range(n_slots)],
            [prior_precision() for _ in range(n_slots)],
            precision_min=PRIOR_PRECISION,
            recent_start=RECENT_START,
            recent_smoothing=RECENT_SMOOTHING,
        )

    def set_slot(self, slot: int, weights: Sequence[float], precision: Sequence[float]) -> None:
        """Give one slot the weights of an offline fit and how firmly each is known.

        Raises ValueError unless both have one finite number per feature, precision above 0.
        """
        self.set_row(
            slot,
            _checked_row(weights, "weights", -math.inf),
            _checked_row(precision, "precision", 0.0),
        )

    def to_json(self) -> dict[str, object]:
        """A plain dict that json can write: weights and precision, not the history."""
        return {
            "version": FORMAT_VERSION,
            "features": list(FEATURES),
            "weights": self.weights,
            "precision": self.precision,
        }

    @classmethod
    def from_json(cls, data: object, *, n_slots: int | None = None) -> SurvivalModel:
        """The model that to_json() wrote, as the start of online learning.

        n_slots: longest draft where that is not the fit's; slots beyond the fit begin like its last
        one, but loosely. Raises ValueError when malformed, of another version or other features.
        """
        if not isinstance(data, Mapping) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"calibration is not of version {FORMAT_VERSION}; calibrate anew")
        names = data.get("features")
        if not isinstance(names, list) or not all(name in FEATURES for name in names):
            raise ValueError("calibration has features that are unknown here; calibrate anew")
        weights, precision = data.get("weights"), data.get("precision")
        if not isinstance(weights, list) or not isinstance(precision, list):
            raise ValueError("calibration has no weights and precision; calibrate anew")
        if not 0 < len(weights) == len(precision):
            raise ValueError(
                f"calibration has weights of {len(weights)} slots and precision of "
                f"{len(precision)}; calibrate anew"
            )
        model = cls(len(weights) if n_slots is None else n_slots)
        known: list[float] = []
        for slot in range(model.n_slots):
            trust = prior_precision()
            if slot < len(weights):
                known = _named(names, weights[slot], prior(slot), "weights")
                trust = _named(names, precision[slot], trust, "precision")
            model.set_slot(slot, known, trust)
        return model

    def lengthened(self, n_slots: int) -> SurvivalModel:
        """A model for drafts of n_slots tokens, this one if it has them: as from_json makes it."""
        if n_slots <= self.n_slots:
            return self
        return SurvivalModel.from_json(self.to_json(), n_slots=n_slots)


def prior(slot: int) -> list[float]:
    """The weights of a slot (from 0) before any data, one per feature."""
    copied, cached = (
        biases[min(slot, len(biases) - 1)] for biases in (LOOKUP_BIASES, CACHED_BIASES)
    )
    return [*DRAFTER_PRIOR, copied, *LOOKUP_PRIOR, cached, *CACHED_PRIOR]


def prior_precision() -> list[float]:
    """How firmly the weights of a prior are known, one precision per feature."""
    n_drafter = len(DRAFTER_PRIOR)
    return [PRIOR_PRECISION] * n_drafter + [LOOKUP_PRECISION] * (len(FEATURES) - n_drafter)


def _named(names: Sequence[str], row: object, start: Sequence[float], what: str) -> list[float]:
    """A saved row in our order of features; those that it lacks begin like a prior."""
    if not isinstance(row, list) or len(row) != len(names):
        raise ValueError(f"calibration's {what} need {len(names)} numbers; calibrate anew")
    saved = dict(zip(names, row, strict=True))
    return [saved.get(name, value) for name, value in zip(FEATURES, start, strict=True)]


def _checked_row(row: object, name: str, above: float) -> list[float]:
    """One finite number per feature, each above a limit."""
    if not isinstance(row, Sequence) or len(row) != len(FEATURES):
        raise ValueError(f"calibration's {name} need {len(FEATURES)} numbers; calibrate anew")
    for value in row:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (above < value and abs(value) <= sys.float_info.max):
            raise ValueError(f"calibration's {name} have {value!r}; calibrate anew")
    return [float(value) for value in row]
