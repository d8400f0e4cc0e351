"""Collects what a round proposed, weighed and gained, and writes it to a trace.

Refuses to know how any of it was decided. Costs nothing unless a trace was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from .scheduler import RoundPlan
from .sequence import Request
from .signals import DraftSignals
from .trace import TraceBlock, TraceRound, TraceSequence, TraceWriter


class RoundRecorder:
    """One round at a time: propose, weigh, take while it is planned, gain for each, write."""

    __slots__ = (
        "_alternatives",
        "_blocks",
        "_draft_s",
        "_n_rounds",
        "_pass_s",
        "_predicted_s",
        "_sequences",
        "_taken",
        "_verify_s",
    )

    def __init__(self) -> None:
        self._n_rounds = 0
        self._forget()

    def _forget(self) -> None:
        self._blocks: dict[int, list[TraceBlock]] = {}
        self._sequences: list[TraceSequence] = []
        self._alternatives: list[tuple[int, float, float]] = []
        self._predicted_s: float | None = None
        self._taken: dict[int, str] = {}  # request -> whose tokens are verified, if any are
        self._draft_s = self._verify_s = self._pass_s = 0.0

    def propose(
        self,
        proposer: str,
        requests: Sequence[Request],
        drafts: Sequence[DraftSignals],
        survival: Sequence[Sequence[float]],
    ) -> None:
        """What a proposer offered to each request, whether it is verified or not."""
        for request, signals, chances in zip(requests, drafts, survival, strict=True):
            if signals.tokens:
                block = TraceBlock(
                    proposer=proposer,
                    tokens=signals.tokens,
                    confidence=signals.confidence,
                    certainty=signals.certainty,
                    match_len=signals.match_len,
                    survival=list(chances),
                    is_cached=signals.is_cached,
                    cache_agreement=signals.cache_agreement,
                    cache_count=signals.cache_count,
                )
                self._blocks.setdefault(request.id, []).append(block)

    def draft(self, seconds: float) -> None:
        """How long the drafter's pass took."""
        self._draft_s = seconds

    def verify(self, verify_s: float, pass_s: float) -> None:
        """How long evaluating and drawing took; pass_s: of that, llama.cpp."""
        self._verify_s, self._pass_s = verify_s, pass_s

    def weigh(self, alternatives: Sequence[RoundPlan], chosen: RoundPlan) -> None:
        """What each way to run the round promised, and the one taken."""
        self._alternatives = [
            (plan.batch_tokens, plan.expected_tokens, plan.expected_s) for plan in alternatives
        ]
        self._predicted_s = chosen.expected_s

    def take(self, requests: Sequence[Request], proposers: Sequence[str]) -> None:
        """Whose proposal is taken for each request, should any of it be verified."""
        self._taken = {r.id: name for r, name in zip(requests, proposers, strict=True)}

    def gain(
        self,
        request: Request,
        position: int,
        emitted: Sequence[int],
        verify_tokens: Sequence[int],
        n_accepted: int,
    ) -> None:
        """What one request gained; position: of the first emitted token."""
        verify_len = len(verify_tokens) - 1  # without the anchor
        self._sequences.append(
            TraceSequence(
                request=request.id,
                position=position,
                emitted=list(emitted),
                n_accepted=n_accepted,
                verify_len=verify_len,
                proposer=self._taken.get(request.id) if verify_len else None,
                blocks=self._blocks.get(request.id, []),
            )
        )

    def write(
        self,
        trace: TraceWriter,
        *,
        depth: int,
        state: str,
        batch_tokens: int,
        round_s: float,
    ) -> None:
        """Close the round, which took round_s seconds in all."""
        trace.write(
            TraceRound(
                round=self._n_rounds,
                t_s=trace.t_s,
                depth=depth,
                state=state,
                batch_tokens=batch_tokens,
                draft_s=self._draft_s,
                verify_s=self._verify_s,
                pass_s=self._pass_s,
                own_s=max(round_s - self._draft_s - self._verify_s, 0.0),  # sums round off
                predicted_s=self._predicted_s,
                alternatives=self._alternatives,
                sequences=self._sequences,
            )
        )
        self._n_rounds += 1
        self._forget()
