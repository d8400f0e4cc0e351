"""Whether one sequence's drafts are worth their time, beside others that draft in the same pass.

Refuses to know: models, costs and clocks; what a draft is worth and its price come in, in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from .probing import NEWCOMER_ROUNDS

WORTH_SMOOTHING = 1 / 8
WORTH_DRAFTS = 6  # of a sequence, before it is parked on its own
BEHIND_ROUNDS = 8  # without a draft
RESUME_MARGIN = 1.2  # over the price, for a sequence that was parked on its own


@dataclass(slots=True)
class Worth:
    """What the drafts of one sequence gain, in tokens a round, the time to verify them paid."""

    mean: float = 0.0
    n_drafts: int = 0
    n_rounds: int = 0
    n_idle: int = 0  # rounds since the last one with a draft
    is_parked: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether its sequence has decoded for a while and was never drafted for."""
        return self.n_drafts == 0 and self.n_rounds > NEWCOMER_ROUNDS

    @property
    def is_behind(self) -> bool:
        """Whether a draft would first inject what came meanwhile."""
        return self.n_idle > BEHIND_ROUNDS

    def pass_round(self) -> None:
        """One more round begins."""
        self.n_rounds += 1
        self.n_idle += 1

    def observe(self, worth: float) -> None:
        self.n_drafts += 1
        self.n_idle = 0
        self.mean += max(WORTH_SMOOTHING, 1.0 / self.n_drafts) * (worth - self.mean)

    def pays(self, price: float) -> bool:
        """Whether a draft gains more than it costs; price: tokens that its time would give."""
        if self.n_drafts >= WORTH_DRAFTS:
            self.is_parked = self.mean < price * (RESUME_MARGIN if self.is_parked else 1.0)
        return not self.is_parked
