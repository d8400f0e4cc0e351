"""Whether drafting pays: draft, park, resume.

Refuses to know: models, clocks and lengths; gains come in, decisions and their reason go out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

PROBE_SMOOTHING = 0.25  # probes are rare, so each weighs more than a draft of a drafting phase
MAX_FIRST_GAIN = 2.0  # of the first `min_drafts` drafts: nothing has taught their promises yet
MAX_START_GAIN = 1.25  # nor hide for long that this request is poor where others were good
MIN_PARKED_GAIN = 0.6  # what came before must not keep a drafter parked that has turned good


@dataclass(slots=True)
class Parking:
    """Decides whether drafting pays: drafts, parks, resumes.

    The state follows the mean gain (drafted over other tokens per second) of the time spent: the
    mean seconds that the tokens of a drafted round would take without its draft, over its mean
    seconds. Total tokens over total time is what the user feels, and good rounds take longer: a
    mean that counts rounds alike would park a drafter that pays. It parks when the mean is below
    `park_below` by more than its standard error, never on fewer than `min_drafts` drafts since
    drafting began, and resumes when the mean passes `resume_above`; the gap keeps it from flapping.

    Raises ValueError when made with a trial below one draft or with thresholds that cross.
    """

    min_drafts: int = 8
    park_below: float = 1.0
    resume_above: float = 1.03
    smoothing: float = 1 / 64
    state: Literal["drafting", "parked"] = field(default="drafting", init=False)
    n_drafts: int = field(default=0, init=False)
    _mean_s: float = field(default=0.0, init=False, repr=False)  # of a drafted round, and ...
    _mean_without_s: float = field(default=0.0, init=False, repr=False)  # ... without its draft
    _variance: float = field(default=0.0, init=False, repr=False)  # of one round's say in the gain
    _n_trial_drafts: int = field(default=0, init=False, repr=False)
    _basis: str = field(default="", init=False, repr=False)  # what it began with

    def __post_init__(self) -> None:
        if self.min_drafts < 1:
            raise ValueError(f"min_drafts {self.min_drafts} must be at least 1")
        if self.park_below > self.resume_above:
            raise ValueError(
                f"park_below {self.park_below} is above resume_above {self.resume_above}; "
                "it would park and resume on the same gain"
            )
        if not 0.0 < self.smoothing <= 1.0:
            raise ValueError(f"smoothing {self.smoothing} is outside 0..1")

    @property
    def mean_gain(self) -> float:
        """Drafted over other tokens per second, over the time observed; 1 before any."""
        return self._mean_without_s / self._mean_s if self._mean_s > 0.0 else 1.0

    @property
    def reason(self) -> str:
        """Why it drafts or is parked, in words for the chat, /health and the statistics."""
        if self.state == "drafting" and self._n_trial_drafts < self.min_drafts:
            return f"drafting: on trial ({self._n_trial_drafts} of {self.min_drafts} drafts)"
        promise = "drafting promises" if self.state == "parked" else "promises"
        count = f"{self.n_drafts} draft{'s' if self.n_drafts != 1 else ''} measured"
        basis = count if self.n_drafts else self._basis
        if self.state == "parked" and self.mean_gain >= self.park_below:
            basis += f", {self.resume_above:.2f}x resumes it"
        return f"{self.state}: {promise} {self.mean_gain:.2f}x of plain decoding ({basis})"

    def start(self, rounds: Sequence[tuple[float, float]], basis: str) -> None:
        """Begin with what others promise, in place of a trial: they weigh like a trial's drafts.

        rounds: gain and seconds of each, as `observe` takes them. basis: where they come from, in
        words. Raises ValueError without any.
        """
        if not rounds:
            raise ValueError("no rounds to start from; without them a trial tells")
        self._mean_s = sum(seconds for _, seconds in rounds) / len(rounds)
        self._mean_without_s = sum(gain * seconds for gain, seconds in rounds) / len(rounds)
        says = [(gain - self.mean_gain) * seconds / self._mean_s for gain, seconds in rounds]
        self._variance = sum(say * say for say in says) / len(rounds)
        self._basis = basis
        self._n_trial_drafts = max(len(rounds), self.min_drafts)
        self._decide(is_whole=True)
        self._n_trial_drafts = self.min_drafts

    def observe(
        self, gain: float, seconds: float, n_drafts: int = 1, *, is_whole: bool = True
    ) -> None:
        """Take one drafted round: drafted over other tokens per second, at least 0, and its time.

        seconds: of the round, above 0. n_drafts: sequences drafted for. is_whole: False while more
        drafts of the same probe follow, which decide together. Raises ValueError for a negative
        gain, a round without time, or no draft.
        """
        if not (0.0 <= gain < math.inf and 0.0 < seconds < math.inf) or n_drafts < 1:
            raise ValueError(
                f"gain {gain} over {seconds} s of {n_drafts} drafts is not a ratio of two speeds"
            )
        if self.n_drafts == 0:
            self._mean_without_s = min(self._mean_without_s, MAX_START_GAIN * self._mean_s)
        self.n_drafts += n_drafts
        if self.n_drafts <= self.min_drafts:
            gain = min(gain, MAX_FIRST_GAIN)
        if self.state == "drafting":
            self._n_trial_drafts += n_drafts
            # A plain mean over the first drafts of a drafting phase, which owe nothing to the past.
            weight = min(1.0, n_drafts * max(self.smoothing, 1.0 / self._n_trial_drafts))
        else:
            weight = PROBE_SMOOTHING
            self._mean_without_s = max(self._mean_without_s, MIN_PARKED_GAIN * self._mean_s)
        before = self.mean_gain
        self._mean_s += weight * (seconds - self._mean_s)
        self._mean_without_s += weight * (gain * seconds - self._mean_without_s)
        # A ratio of two means errs by the mean of such differences.
        difference = (gain - before) * seconds / self._mean_s
        self._variance = (1.0 - weight) * (self._variance + weight * difference * difference)
        self._decide(is_whole=is_whole)

    def _decide(self, *, is_whole: bool) -> None:
        if self.state == "parked":
            if is_whole and self.mean_gain > self.resume_above:
                self.state, self._n_trial_drafts, self._variance = "drafting", 0, 0.0
        elif self._n_trial_drafts >= self.min_drafts:
            # A hopeless drafter's gains hardly vary and park it at once; where they vary, a mean of
            # few says little, and parking a drafter that pays costs more than a longer trial.
            n_effective = min(self._n_trial_drafts, 1.0 / self.smoothing)
            if self.mean_gain + math.sqrt(self._variance / n_effective) < self.park_below:
                self.state = "parked"
