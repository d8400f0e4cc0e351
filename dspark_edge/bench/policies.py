"""Policies that replay compares: what to draft and verify, round by round.

Owns: plain, fixed lengths, a confidence threshold, the paper's Algorithm 1, and ours. Refuses to
know: the text ahead (n_correct, which oracles.py reads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..competition import Competition
from ..confidence import SURVIVAL_FLOOR, SurvivalModel
from ..cost import DEPTH_STEP, CostTable
from ..ledger import DraftLedger
from ..signals import NOTHING, DraftSignals
from .recorded import Proposal

INJECTION_DRAFTS = 8.0  # 11 ms for 64 tokens, where a draft of SmolLM2's drafter takes 1.3 ms


class Times:
    """A cost table's times (Costs), remembered; they depend on depth by bucket only."""

    __slots__ = ("_verify", "table")

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._verify: dict[tuple[int, int], float] = {}

    def verify_s(self, batch_tokens: int, depth: int) -> float:
        key = (batch_tokens, depth // DEPTH_STEP)
        if key not in self._verify:
            self._verify[key] = self.table.verify_s(batch_tokens, depth)
        return self._verify[key]

    def draft_s(self, n_seq: int) -> float:
        return self.table.draft_s(n_seq) if n_seq else 0.0

    @property
    def other_s(self) -> float:
        return self.table.other_s

    def round_s(self, batch_tokens: int, depth: int, n_drafting: int) -> float:
        """A whole round; n_drafting: sequences in the drafter's pass, 0 without one."""
        return self.draft_s(n_drafting) + self.verify_s(batch_tokens, depth) + self.other_s


@dataclass(slots=True, frozen=True)
class Offer:
    """One sequence at the start of a round: `sequence` is its name, proposals are by proposer."""

    sequence: int
    position: int
    proposals: Mapping[str, Proposal]


@dataclass(slots=True, frozen=True)
class Choice:
    """What one round does: for how many the drafter runs, and what is verified of what.

    extra_s: seconds that the drafter takes beside its pass.
    """

    drafted: int
    verify: list[tuple[Proposal | None, int]]
    extra_s: float = 0.0


class Policy(Protocol):
    """Chooses a round; then hears what each sequence emitted, and when it ends."""

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice: ...
    def learn(self, sequence: int, position: int, tokens: Sequence[int]) -> None: ...
    def finish(self, sequence: int) -> None: ...


class Fixed:
    """The same draft length whenever `proposer` proposes; a proposer of "" is plain decoding."""

    def __init__(self, proposer: str, verify_len: int) -> None:
        self._proposer = proposer
        self._verify_len = verify_len

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        proposals = [offer.proposals.get(self._proposer) for offer in offers]
        return Choice(
            drafted=len(offers) if self._proposer == "drafter" and any(proposals) else 0,
            verify=[(p, self._length(p.signals) if p else 0) for p in proposals],
        )

    def _length(self, signals: DraftSignals) -> int:
        return min(self._verify_len, len(signals.tokens))

    def learn(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        return

    def finish(self, sequence: int) -> None:
        return


class Threshold(Fixed):
    """Verifies up to the first token whose confidence is below a threshold (llama.cpp's p_min)."""

    def __init__(self, proposer: str, threshold: float) -> None:
        super().__init__(proposer, 1)
        self._threshold = threshold

    def _length(self, signals: DraftSignals) -> int:
        confidence = stated_confidence(signals)
        return next((k for k, c in enumerate(confidence) if c < self._threshold), len(confidence))


def stated_confidence(signals: DraftSignals) -> list[float]:
    """c_k as the proposer says it: its head, its certainty as odds, or the match's length."""
    if signals.confidence is not None:
        return signals.confidence
    if signals.certainty:
        return [1.0 / (1.0 + math.exp(-margin)) for margin in signals.certainty]
    return [signals.match_len / (1.0 + signals.match_len)] * len(signals.tokens)


class Learner:
    """One survival model, taught by the text as it arrives; a ledger per sequence."""

    def __init__(self, model: SurvivalModel) -> None:
        self._model = model
        self._ledgers: dict[int, DraftLedger] = {}

    def signals(self, offer: Offer, proposer: str) -> DraftSignals:
        """What a proposer says to a sequence, the acceptance known by now included."""
        proposal = offer.proposals.get(proposer)
        if proposal is None:
            return NOTHING
        return self._ledger(offer).known(proposal.signals)

    def survival(self, signals: DraftSignals) -> list[float]:
        """a_k of a proposal."""
        return self._model.survival(signals, SURVIVAL_FLOOR) if signals.tokens else []

    def record(self, offer: Offer, signals: DraftSignals) -> None:
        """Remember a proposal until the text decides it."""
        self._ledger(offer).record(offer.position, signals)

    def _ledger(self, offer: Offer) -> DraftLedger:
        return self._ledgers.setdefault(offer.sequence, DraftLedger())

    def learn(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        ledger = self._ledgers.get(sequence)
        for resolved in ledger.resolve(position, tokens) if ledger else ():
            self._model.observe(*resolved)

    def finish(self, sequence: int) -> None:
        ledger = self._ledgers.pop(sequence, None)
        for resolved in ledger.flush() if ledger else ():
            self._model.observe(*resolved)


class Algorithm1(Learner):
    """The paper's scheduler (DSpark, arXiv 2607.05147, Algorithm 1), with our calibrated survival.

    Always drafts; admits tokens by falling survival for as long as theta rises.
    """

    def __init__(self, proposer: str, model: SurvivalModel) -> None:
        super().__init__(model)
        self._proposer = proposer

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        proposals = [offer.proposals.get(self._proposer) for offer in offers]
        signals = [self.signals(offer, self._proposer) for offer in offers]
        rows = [self.survival(each) for each in signals]
        for offer, each in zip(offers, signals, strict=True):
            self.record(offer, each)
        n_drafting = len(offers) if self._proposer == "drafter" and any(proposals) else 0
        depth = depth_of(offers)
        lengths = admit_while_rising(
            rows, lambda batch_tokens: times.round_s(batch_tokens, depth, n_drafting)
        )
        return Choice(n_drafting, list(zip(proposals, lengths, strict=True)))


def admit_while_rising(
    survival: Sequence[Sequence[float]], round_s: Callable[[int], float]
) -> list[int]:
    """Algorithm 1's lengths: the first local maximum of theta along the admission order."""
    lengths = [0] * len(survival)
    order = sorted((-a, k, r) for r, row in enumerate(survival) for k, a in enumerate(row))
    tokens, batch_tokens = float(len(survival)), len(survival)
    theta = tokens / round_s(batch_tokens)
    for negative, _, r in order:
        tokens, batch_tokens = tokens - negative, batch_tokens + 1
        if tokens / round_s(batch_tokens) <= theta:
            break
        theta = tokens / round_s(batch_tokens)
        lengths[r] += 1
    return lengths


class Ours(Learner):
    """What the engine does: the same competition, on the same numbers.

    injection_drafts: what a probe takes to inject the tokens that came while parked, in drafts.
    """

    def __init__(
        self,
        model: SurvivalModel,
        times: Times,
        typical: Sequence[Sequence[float]] = (),
        *,
        injection_drafts: float = INJECTION_DRAFTS,
    ) -> None:
        super().__init__(model)
        self._competition = Competition(times, typical=typical)
        self._injection_drafts = injection_drafts

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        looked = [self.signals(offer, "lookup") for offer in offers]
        wanted = self._competition.wants(
            [offer.sequence for offer in offers],
            [self.survival(each) for each in looked],
            depth=depth_of(offers),
            max_batch_tokens=sum(1 + _longest(offer) for offer in offers),
            may_draft=any("drafter" in offer.proposals for offer in offers),
        )
        extra_s = 0.0
        if wanted and self._competition.is_probe:
            extra_s = self._injection_drafts * times.draft_s(1)
            self._competition.observe_probe(times.draft_s(len(wanted)) + extra_s, len(wanted))
        drafted = {r: self.signals(offers[r], "drafter") for r in wanted}
        rivals = {r: self._model.against(looked[r], draft) for r, draft in drafted.items()}
        drafted = {r: self._model.against(draft, looked[r]) for r, draft in drafted.items()}
        for r, offer in enumerate(offers):
            self.record(offer, rivals.get(r, looked[r]))
            self.record(offer, drafted.get(r, NOTHING))
        choice = self._competition.choose(
            {r: self.survival(each) for r, each in drafted.items()},
            {r: self.survival(each) for r, each in rivals.items()},
        )
        return Choice(
            drafted=len(wanted),
            verify=[
                (offers[r].proposals.get("drafter" if takes else "lookup"), n)
                for r, (takes, n) in enumerate(
                    zip(choice.takes_draft, choice.plan.verify_lens, strict=True)
                )
            ],
            extra_s=extra_s,
        )

    def finish(self, sequence: int) -> None:
        super().finish(sequence)
        self._competition.finish(sequence)


def _longest(offer: Offer) -> int:
    return max((len(p.signals.tokens) for p in offer.proposals.values()), default=0)


def depth_of(offers: Sequence[Offer]) -> int:
    """Tokens in the deepest cache: all before the anchor."""
    return max(offer.position for offer in offers) - 1
