"""Whether drafting pays: draft, park, probe, resume.

Refuses to know: models, clocks and lengths; gains come in, decisions and their reason go out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

PROBE_SMOOTHING = 0.25  # probes are rare, so each weighs more than a draft of a drafting phase
MAX_GAIN = 2.0  # one lucky draft must not outweigh many poor ones
MIN_PARKED_GAIN = 0.6  # what came before must not keep a drafter parked that has turned good


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
        count = f"{self.n_drafts} draft{'s' if self.n_drafts != 1 else ''} measured"
        basis = count if self.n_drafts else "by its calibration"
        if self.state == "parked" and self.mean_gain >= self.park_below:
            basis += f", {self.resume_above:.2f}x resumes it"
        return f"{self.state}: {promise} {self.mean_gain:.2f}x of plain decoding ({basis})"

    def start(self, gains: Sequence[float]) -> None:
        """Begin with the gains that an offline fit promises here, in place of a trial.

        Raises ValueError without any.
        """
        if not gains:
            raise ValueError("no gains to start from; without them a trial tells")
        capped = [min(gain, MAX_GAIN) for gain in gains]
        self.mean_gain = statistics.fmean(capped)
        self._variance = statistics.pvariance(capped)
        self._n_trial_drafts = max(len(gains), self.min_drafts)
        self._decide()

    def wants_draft(self) -> bool:
        """Whether this round should draft; call it once per round that could."""
        if self.state == "drafting":
            self._is_probe = False
            return True
        self._n_rounds_parked += 1  # since the last probe
        self._is_probe = self._n_rounds_parked >= self.probe_every
        if self._is_probe:
            self._n_rounds_parked = 0
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
            self.mean_gain = max(self.mean_gain, MIN_PARKED_GAIN)
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
