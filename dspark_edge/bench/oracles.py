"""Policies of bench replay that know the text ahead: what no estimate can reach."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler import RoundPlan, choose_lengths
from .policies import Choice, Offer, Times, depth_of
from .recorded import Proposal, Text

PLAIN = ""  # no proposer, as Fixed has it


class BestPath:
    """The fastest way through each text that anyone could take: shortest path over positions.

    For one sequence at a time. A policy that only reads its own plan.
    """

    def __init__(self, texts: Sequence[Text], times: Times) -> None:
        self._steps = [_best_steps(text, times) for text in texts]
        self._starts = [text.start for text in texts]

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        (offer,) = offers
        name, verify_len = self._steps[offer.sequence][
            offer.position - self._starts[offer.sequence]
        ]
        return Choice(int(name == "drafter"), [(offer.proposals.get(name), verify_len)])

    def learn(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        return

    def finish(self, sequence: int) -> None:
        return


def _best_steps(text: Text, times: Times) -> list[tuple[str, int]]:
    """For each position, whose tokens to verify and how many; PLAIN and 0 for none."""
    n = len(text.tokens)
    rest_s = [0.0] * (n + 1)  # the shortest time from here to the end
    steps = [(PLAIN, 0)] * n
    for at in range(n - 1, -1, -1):
        depth = text.start + at - 1
        rest_s[at] = times.round_s(1, depth, 0) + rest_s[at + 1]
        for proposal in text.proposals[at]:
            n_drafting = int(proposal.proposer == "drafter")
            # Longer than correct as well: a wider pass may be cheaper.
            for verify_len in range(1, len(proposal.signals.tokens) + 1):
                n_emitted = min(verify_len, proposal.n_correct) + 1
                seconds = times.round_s(1 + verify_len, depth, n_drafting) + rest_s[at + n_emitted]
                if seconds < rest_s[at]:
                    rest_s[at], steps[at] = seconds, (proposal.proposer, verify_len)
    return steps


class Oracle:
    """Knows n_correct and takes the round with the most tokens per second: not quite a bound.

    always_drafts: the drafter runs in every round; only then does it know what is right. What lies
    between such a policy and ours is what better estimates could gain.
    """

    def __init__(self, *, always_drafts: bool = False) -> None:
        self._always_drafts = always_drafts

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        free, drafted = (self._plan(offers, times, drafted) for drafted in (False, True))
        if self._always_drafts and any("drafter" in offer.proposals for offer in offers):
            return drafted[1]
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
