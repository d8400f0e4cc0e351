"""Whether to draft in this round, with what, and how much of it to verify.

Joins the proposer (the drafter's pass or prompt lookup), the survival model, the cost table and the
park / probe machine. Refuses to know text, requests' parameters and caches. Nothing in here can
change what is emitted: it only proposes tokens for the target to agree with or not.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from .confidence import DraftSignals, SurvivalModel
from .cost import CostTable
from .errors import DecodeError
from .scheduler import Parking, choose_lengths
from .sequence import Request

Mode = Literal["auto", "always", "off"]
Proposer = Literal["drafter", "lookup"]

PROBE_COST = 0.02  # share of plain decoding that probes may cost while parked
PROBE_EVERY = 32  # rounds; at least
SETTLE_AT = 24  # observations, three or four a round, that wait to be learnt from together
SILENT_ROUNDS = 50  # drafted rounds without one proposed token, before that is said


class Drafts(Protocol):
    """What the drafter proposes for one sequence (_core.Draft)."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def confidence(self) -> list[float]: ...
    @property
    def certainty(self) -> list[float]: ...


class Drafter(Protocol):
    """The part of the block decoder that drafts."""

    def draft(self, seq_ids: Sequence[int], anchors: Sequence[int]) -> Sequence[Drafts]: ...


class Speculation:
    """Plans a round's verify_tokens and learns from what became of them."""

    __slots__ = (
        "_cost",
        "_drafter",
        "_later",
        "_n_max",
        "_n_rounds",
        "_n_silent",
        "_off_reason",
        "_parking",
        "_survival",
        "_verify_len",
        "mode",
        "proposer",
    )

    def __init__(
        self,
        *,
        mode: Mode,
        proposer: Proposer | None,
        off_reason: str,
        drafter: Drafter,
        cost: CostTable,
        n_max: int,
        verify_len: int | None = None,
    ) -> None:
        """n_max: draft tokens per sequence at most. verify_len: fixed length in mode "always".

        proposer None, or mode "off", means plain decoding; off_reason says why.
        """
        self.mode = mode
        self.proposer = proposer if mode != "off" else None
        self._off_reason = off_reason
        self._drafter = drafter
        self._cost = cost
        self._n_max = n_max
        self._verify_len = verify_len
        self._survival = SurvivalModel(max(n_max, 1))
        self._parking = Parking(probe_every=self._probe_every())
        self._n_silent = 0
        self._n_rounds = 0
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def reason(self) -> str:
        """State and reason in words, e.g. "parked: drafting promises 0.83x of plain decoding"."""
        if self.proposer is None:
            return f"off: {self._off_reason}"
        if self.mode == "always":
            return f"always on ({self.proposer})"
        if self.proposer == "lookup":
            return "lookup: verifies a match where that pays"
        return self._parking.reason

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) per draft position, given that the positions before were right."""
        self._settle()
        return self._survival.acceptance_by_position

    def turn_off(self, reason: str) -> None:
        """Plain decoding from now on."""
        self.proposer, self._off_reason = None, reason

    def plan(
        self, requests: Sequence[Request], n_ctx: int, max_batch_tokens: int
    ) -> list[list[int]]:
        """Draft tokens to verify for each request; [] means its anchor alone."""
        drafts = self._propose(requests, n_ctx)
        if drafts is None:
            return [[] for _ in requests]
        lengths = self._lengths(requests, drafts, n_ctx, max_batch_tokens)
        plan = []
        for request, signals, n in zip(requests, drafts, lengths, strict=True):
            request.stats.n_drafted += len(signals.tokens)
            self._later.append((request.ledger.record, (len(request.tokens), signals)))
            plan.append(signals.tokens[:n])
        return plan

    def learn(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        """Take the tokens that a request emitted from `position` on, drafted or not."""
        if self.proposer is not None:
            self._later.append((self._resolve, (request, position, token_ids)))

    def finish(self, request: Request) -> None:
        """Take what the text said of the drafts that its end leaves undecided."""
        self._settle()
        for signals, n_correct, n_seen in request.ledger.flush():
            self._survival.observe(signals, n_correct, n_seen)

    def observe_round(self, batch_tokens: int, depth: int, verify_s: float, own_s: float) -> None:
        """Take the measured times of one round's target pass and of the rest, in seconds."""
        if self.proposer is not None:
            self._later.append((self._cost.observe_verify, (batch_tokens, depth, verify_s)))
            self._later.append((self._cost.observe_other, (own_s,)))
            self._n_rounds += 1
            if len(self._later) >= min(SETTLE_AT, self._n_rounds):  # at once in the beginning
                self._settle()

    def _settle(self) -> None:
        """Learn from the last rounds at once.

        A model pass flushes the processor's caches, so Python code that runs once a round runs cold
        and takes up to ten times as long: what can wait a few rounds is done together.
        """
        for call, values in self._later:
            call(*values)
        self._later.clear()

    def _resolve(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        for signals, n_correct, n_seen in request.ledger.resolve(position, token_ids):
            self._survival.observe(signals, n_correct, n_seen)

    def _propose(self, requests: Sequence[Request], n_ctx: int) -> list[DraftSignals] | None:
        if self.proposer == "lookup":
            return [self._look_up(request) for request in requests]
        if self.proposer is None:
            return None
        if self.mode == "auto" and not self._parking.wants_draft():
            return None
        if len(requests) == 1 and not requests[0].n_draft_room(n_ctx):
            return None
        start = time.perf_counter()
        try:
            drafts = self._drafter.draft(
                [request.seq_id for request in requests],
                [request.tokens[-1] for request in requests],
            )
        except DecodeError as error:
            self.turn_off(f"the drafter failed: {error}")
            warnings.warn(f"speculation off: {error}", RuntimeWarning, stacklevel=2)
            return None
        if not self._parking.is_probe:  # a probe also injects what piled up while parked
            draft_s = time.perf_counter() - start
            self._later.append((self._cost.observe_draft, (len(requests), draft_s)))
        signals = [DraftSignals(d.tokens, d.confidence or None, d.certainty) for d in drafts]
        self._watch_silence(signals)
        return signals

    def _look_up(self, request: Request) -> DraftSignals:
        if request.lookup is None:
            raise ValueError("a request without a lookup index cannot be looked up")
        request.lookup.extend(request.tokens[len(request.lookup) :])
        proposal = request.lookup.propose(self._n_max)
        return DraftSignals(
            tokens=proposal.tokens, confidence=None, certainty=[], match_len=proposal.match_len
        )

    def _lengths(
        self,
        requests: Sequence[Request],
        drafts: Sequence[DraftSignals],
        n_ctx: int,
        max_batch_tokens: int,
    ) -> Sequence[int]:
        rooms = [min(r.n_draft_room(n_ctx), self._n_max) for r in requests]
        if self.mode == "always":
            wanted = self._n_max if self._verify_len is None else self._verify_len
            # An equal share of the pass for each, its anchor left out.
            most = min(wanted, max_batch_tokens // len(requests) - 1)
            return [min(room, most, len(d.tokens)) for room, d in zip(rooms, drafts, strict=True)]
        survival = [
            self._survival.survival(d)[:room] for d, room in zip(drafts, rooms, strict=True)
        ]
        depth = max(request.n_past for request in requests)
        draft_s = self._cost.draft_s(len(requests)) if self.proposer == "drafter" else 0.0

        def verify_s(batch_tokens: int) -> float:
            return self._cost.verify_s(batch_tokens, depth)

        plan = choose_lengths(
            survival,
            verify_s,
            draft_s=draft_s,
            other_s=self._cost.other_s,
            max_batch_tokens=max_batch_tokens,
        )
        if self.proposer == "drafter":
            plain_s = verify_s(len(requests)) + self._cost.other_s
            self._parking.observe(plan.tps * plain_s / len(requests))
        return plan.verify_lens

    def _probe_every(self) -> int:
        """Rounds between probes, so that a parked drafter costs at most PROBE_COST."""
        if self.mode != "auto" or self.proposer != "drafter":
            return PROBE_EVERY
        plain_s = self._cost.verify_s(1, 0)
        return max(PROBE_EVERY, math.ceil(self._cost.draft_s(1) / (PROBE_COST * plain_s)))

    def _watch_silence(self, drafts: Sequence[DraftSignals]) -> None:
        if drafts[0].tokens or any(draft.tokens for draft in drafts):
            self._n_silent = 0
            return
        self._n_silent += 1
        if self._n_silent == SILENT_ROUNDS:
            message = f"the drafter proposed nothing in {SILENT_ROUNDS} rounds"
            warnings.warn(f"speculation is of no use: {message}", RuntimeWarning, stacklevel=2)
            self.turn_off(message)
