"""Policies that replay compares: what to draft and verify, round by round.

Owns: plain, fixed lengths, a confidence threshold, the paper's Algorithm 1, ours, and the oracle's
greedy form. Refuses to know: the text ahead, except through n_correct, which only the oracle reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..competition import Competition
from ..confidence import DraftSignals, SurvivalModel
from ..cost import DEPTH_STEP, CostTable
from ..ledger import DraftLedger
from ..scheduler import RoundPlan, choose_lengths
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

    def survival(self, offer: Offer, proposal: Proposal) -> list[float]:
        """a_k of a proposal, which is remembered until the text decides it."""
        ledger = self._ledgers.setdefault(offer.sequence, DraftLedger())
        is_lookup = proposal.proposer == "lookup"
        recent = ledger.recent_lookup if is_lookup else ledger.recent
        signals = replace(proposal.signals, recent=recent)
        ledger.record(offer.position, signals)
        return self._model.survival(signals)

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
        rows = [self.survival(o, p) if p else [] for o, p in zip(offers, proposals, strict=True)]
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
        looked = [self._pick(offer, "lookup") for offer in offers]
        wanted = self._competition.wants(
            [offer.sequence for offer in offers],
            [row for _, row in looked],
            depth=depth_of(offers),
            max_batch_tokens=sum(1 + _longest(offer) for offer in offers),
            may_draft=any("drafter" in offer.proposals for offer in offers),
        )
        extra_s = 0.0
        if wanted and self._competition.is_probe:
            extra_s = self._injection_drafts * times.draft_s(1)
            self._competition.observe_probe(times.draft_s(len(wanted)) + extra_s)
        drafted = {r: self._pick(offers[r], "drafter") for r in wanted}
        choice = self._competition.choose({r: row for r, (_, row) in drafted.items()})
        picks = [(drafted if takes else looked)[r] for r, takes in enumerate(choice.takes_draft)]
        lengths = choice.plan.verify_lens
        return Choice(
            drafted=len(wanted),
            verify=[(proposal, n) for (proposal, _), n in zip(picks, lengths, strict=True)],
            extra_s=extra_s,
        )

    def _pick(self, offer: Offer, proposer: str) -> tuple[Proposal | None, list[float]]:
        proposal = offer.proposals.get(proposer)
        return (proposal, self.survival(offer, proposal)) if proposal else (None, [])

    def finish(self, sequence: int) -> None:
        super().finish(sequence)
        self._competition.finish(sequence)


def _longest(offer: Offer) -> int:
    return max((len(p.signals.tokens) for p in offer.proposals.values()), default=0)


class Oracle:
    """Knows n_correct and takes the round with the most tokens per second: not quite a bound."""

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        free, drafted = (self._plan(offers, times, drafted) for drafted in (False, True))
        return free[1] if free[0].tps >= drafted[0].tps else drafted[1]

    def _plan(
        self, offers: Sequence[Offer], times: Times, drafted: bool
    ) -> tuple[RoundPlan, Choice]:
        depth = depth_of(offers)
        proposals = [_most_correct(offer, drafted) for offer in offers]
        plan = choose_lengths(
            [
                [float(k < p.n_correct) for k in range(len(p.signals.tokens))] if p else []
                for p in proposals
            ],
            lambda batch_tokens: times.verify_s(batch_tokens, depth),
            draft_s=times.table.draft_s(len(offers)) if drafted else 0.0,
            other_s=times.table.other_s,
            max_batch_tokens=len(offers) + sum(len(p.signals.tokens) for p in proposals if p),
        )
        return plan, Choice(
            len(offers) if drafted else 0, list(zip(proposals, plan.verify_lens, strict=True))
        )

    def learn(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        return

    def finish(self, sequence: int) -> None:
        return


def _most_correct(offer: Offer, drafted: bool) -> Proposal | None:
    rivals = [p for name, p in offer.proposals.items() if drafted or name != "drafter"]
    return max(rivals, key=lambda p: p.n_correct, default=None)


def depth_of(offers: Sequence[Offer]) -> int:
    """Tokens in the deepest cache: all before the anchor."""
    return max(offer.position for offer in offers) - 1
