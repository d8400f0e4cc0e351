"""Policies that replay compares: what to draft and verify, round by round.

Owns: plain, fixed lengths, a confidence threshold, the paper's Algorithm 1, ours, and the oracle's
greedy form. Refuses to know: the text ahead, except through n_correct, which only the oracle reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from ..confidence import DraftSignals, SurvivalModel
from ..cost import DEPTH_STEP, CostTable
from ..ledger import DraftLedger
from ..scheduler import Parking, RoundPlan, choose_lengths
from ..speculation import MIN_GAIN, PROBE_COST, PROBE_EVERY
from .recorded import Proposal


class Times:
    """A cost table's times, remembered; they depend on depth by bucket only."""

    __slots__ = ("_verify", "table")

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._verify: dict[tuple[int, int], float] = {}

    def verify_s(self, batch_tokens: int, depth: int) -> float:
        key = (batch_tokens, depth // DEPTH_STEP)
        if key not in self._verify:
            self._verify[key] = self.table.verify_s(batch_tokens, depth)
        return self._verify[key]

    def round_s(self, batch_tokens: int, depth: int, n_drafting: int) -> float:
        """A whole round; n_drafting: sequences in the drafter's pass, 0 without one."""
        draft_s = self.table.draft_s(n_drafting) if n_drafting else 0.0
        return draft_s + self.verify_s(batch_tokens, depth) + self.table.other_s


@dataclass(slots=True, frozen=True)
class Offer:
    """One sequence at the start of a round: `sequence` is its name, proposals are by proposer."""

    sequence: int
    position: int
    proposals: Mapping[str, Proposal]


@dataclass(slots=True, frozen=True)
class Choice:
    """What one round does: whether the drafter runs, and what is verified of which proposal."""

    drafted: bool
    verify: list[tuple[Proposal | None, int]]


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
            drafted=self._proposer == "drafter" and any(proposals),
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
    """c_k as the proposer says it: its head, else its certainty as odds, else the match's length."""
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
        drafted = self._proposer == "drafter" and any(proposals)
        depth, n_drafting = depth_of(offers), len(offers) if drafted else 0
        lengths = admit_while_rising(
            rows, lambda batch_tokens: times.round_s(batch_tokens, depth, n_drafting)
        )
        return Choice(drafted, list(zip(proposals, lengths, strict=True)))


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


Pick: TypeAlias = "tuple[Proposal | None, list[float]]"  # a proposal with its survival


class Ours(Learner):
    """choose_lengths over calibrated survival; lookup and the drafter compete; parks and probes."""

    def __init__(self, model: SurvivalModel, times: Times) -> None:
        super().__init__(model)
        share = times.table.draft_s(1) / (PROBE_COST * times.verify_s(1, 0))
        self._parking = Parking(probe_every=max(PROBE_EVERY, math.ceil(share)))

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        depth = depth_of(offers)

        def plan(rows: Sequence[Sequence[float]], draft_s: float) -> RoundPlan:
            return choose_lengths(
                rows,
                lambda batch_tokens: times.verify_s(batch_tokens, depth),
                draft_s=draft_s,
                other_s=times.table.other_s,
                max_batch_tokens=len(rows) + sum(map(len, rows)),
                min_gain=MIN_GAIN,
            )

        picks = [self._pick(offer, "lookup") for offer in offers]
        chosen = free = plan([row for _, row in picks], 0.0)
        has_drafter = any("drafter" in offer.proposals for offer in offers)
        drafted = has_drafter and self._parking.wants_draft()
        if drafted:
            draft_s = times.table.draft_s(len(offers))
            for r, offer in enumerate(offers):
                rival = self._pick(offer, "drafter")
                if plan([rival[1]], draft_s).tps > plan([picks[r][1]], draft_s).tps:
                    picks[r] = rival
            chosen = plan([row for _, row in picks], draft_s)
            self._parking.observe(chosen.tps / free.tps)
        proposals = [proposal for proposal, _ in picks]
        return Choice(drafted, list(zip(proposals, chosen.verify_lens, strict=True)))

    def _pick(self, offer: Offer, proposer: str) -> Pick:
        proposal = offer.proposals.get(proposer)
        return (proposal, self.survival(offer, proposal)) if proposal else (None, [])


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
        return plan, Choice(drafted, list(zip(proposals, plan.verify_lens, strict=True)))

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
