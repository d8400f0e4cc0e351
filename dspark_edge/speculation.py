"""Whether to draft in this round, with what, and how much of it to verify.

Joins the proposers (the drafter's pass, prompt lookup), the survival model, the cost table and the
park / probe machine. Refuses to know text, requests' parameters and caches. Nothing in here can
change what is emitted: it only proposes tokens for the target to agree with or not.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from ._core import LookupCache, LookupIndex
from .competition import Competition
from .confidence import SURVIVAL_FLOOR, SurvivalModel
from .cost import CostTable
from .errors import DecodeError
from .recorder import RoundRecorder
from .sequence import Request
from .signals import NOTHING, DraftSignals, looked_up

Mode = Literal["auto", "always", "off"]
Proposer = Literal["drafter", "lookup"]

SETTLE_AT = 24  # observations, three or four a round, that wait to be learnt from together
OBSERVE_S = 0.03  # of equal passes, for each one that corrects the cost table: short ones are many
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
        "_competition",
        "_cost",
        "_draft_s",
        "_drafter",
        "_heard_tokens",
        "_later",
        "_loaded_mode",
        "_lost_reason",
        "_n_lookup",
        "_n_max",
        "_n_rounds",
        "_n_silent",
        "_off_reason",
        "_survival",
        "_unheard_s",
        "_verify_len",
        "held",
        "lookup_cache",
        "mode",
        "proposer",
        "recorder",
        "released",
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
        n_lookup: int = 0,
        survival: SurvivalModel | None = None,
        typical: Sequence[Sequence[float]] = (),
        lookup_cache: LookupCache | None = None,
    ) -> None:
        """n_max: draft tokens per sequence at most. verify_len: fixed length in mode "always".

        proposer None, or mode "off", means plain decoding; off_reason says why. n_lookup: tokens
        that lookup may propose in mode "auto", beside the drafter too, and with verify_len 0, where
        all is proposed for the record. survival, typical: an offline fit, and survival of blocks
        that it was made on. lookup_cache: texts that lookup knows beforehand.
        """
        self.mode = mode
        self._loaded_mode = mode
        self.proposer = proposer if mode != "off" else None
        self.recorder: RoundRecorder | None = None  # set where a trace is written
        self.held = ""  # why nothing is drafted for now
        self.released = ""  # why the drafter is out of memory for now
        self.lookup_cache = lookup_cache
        self._off_reason = off_reason
        self._lost_reason = ""  # why lookup is left of a drafter and lookup
        self._drafter = drafter
        self._cost = cost
        self._n_max = n_max
        self._verify_len = verify_len
        n_always = n_max if proposer == "lookup" else 0
        is_beside = mode == "auto" or verify_len == 0
        self._n_lookup = max(n_always, n_lookup if is_beside else 0)
        n_slots = max(n_max, self._n_lookup, 1)
        self._survival = (survival or SurvivalModel(n_slots)).lengthened(n_slots)
        self._competition = Competition(cost, has_drafter=proposer == "drafter", typical=typical)
        self._n_silent = 0
        self._n_rounds = 0
        self._draft_s = 0.0  # of this round
        self._heard_tokens = 0  # batch_tokens of the last pass that the cost table was told of
        self._unheard_s = 0.0  # of passes like it since then
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def reason(self) -> str:
        """State and reason in words, e.g. "parked: drafting promises 0.83x of plain decoding"."""
        if self.proposer is None:
            return f"off: {self._off_reason}"
        if self.mode == "off":
            return "off: switched off"
        lookup = ", lookup goes on" if self._n_lookup else ""
        if self.released and not self._lost_reason:
            return f"drafter released: {self.released}{'' if self.held else lookup}"
        if self.held:
            return f"parked: {self.held}"
        if self._lost_reason:
            return self._lost_reason + lookup
        if self.mode == "always":
            return f"always on ({self.proposer})"
        if self.proposer == "lookup":
            return "lookup: verifies a match where that pays"
        return self._competition.reason + lookup

    @property
    def bar(self) -> float:
        """How many times plain decoding's speed verifying drafts must promise; 1: no bar."""
        return self._competition.bar

    @bar.setter
    def bar(self, bar: float) -> None:
        self._competition.bar = bar

    def lookup_index(self) -> LookupIndex | None:
        """The index of a new request's tokens; None where nothing is looked up."""
        if self.proposer is None or self._n_lookup == 0:
            return None
        return LookupIndex(self.lookup_cache)

    @property
    def cost(self) -> CostTable:
        """What passes cost, as far as it is known by now."""
        return self._cost

    @property
    def n_proposed_max(self) -> int:
        """Longest draft for one sequence, in tokens."""
        return max(self._n_max, self._n_lookup) if self.proposer is not None else 0

    @property
    def n_proposed_usual(self) -> int:
        """Draft tokens for one sequence as a rule: the drafter's block, or else a long copy."""
        # Under pressure each pass must get narrower, so a copy is cut as short as half that block.
        is_drafter = self.proposer == "drafter" and not self.released
        return self._n_max if is_drafter else self.n_proposed_max

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) per draft position, given that the positions before were right.

        The last rounds may be missing until the request ends: threads may ask while rounds run.
        """
        if self.proposer == "lookup":
            return self._survival.lookup_acceptance_by_position
        return self._survival.acceptance_by_position[: self._n_max]

    def turn_off(self, reason: str) -> None:
        """Plain decoding from now on."""
        self.proposer, self._off_reason = None, reason

    def _lose_drafter(self, reason: str) -> None:
        """Lookup alone from now on where that runs beside the drafter, else plain decoding."""
        self._competition.lose_drafter()
        if self._n_lookup:
            self.proposer, self._lost_reason = "lookup", reason
        else:
            self.turn_off(reason)
        what_is_left = "with lookup alone" if self._n_lookup else "off"
        warnings.warn(f"speculation {what_is_left}: {reason}", RuntimeWarning, stacklevel=3)

    def switch(self, mode: Mode) -> None:
        """Takes another mode from the next round on; what was learnt stays.

        Raises ValueError where nothing can speculate, and for "auto" where no pass was profiled.
        """
        if mode not in ("auto", "always", "off"):
            raise ValueError(f"speculation is {mode!r}; it must be auto, always or off")
        if mode != "off" and self.proposer is None:
            raise ValueError(f"speculation cannot be switched on, it is {self.reason}")
        if mode == "auto" and self._loaded_mode != "auto":
            raise ValueError(
                'speculation cannot be switched to auto: with speculation="always" no pass was '
                'profiled at load; load again with "auto"'
            )
        self.mode = mode

    def will_draft(self, n_seq: int) -> bool:
        """Whether the drafter, as things are, drafts for so many sequences, probes apart."""
        if self.proposer != "drafter" or self.mode == "off" or self.held or self.released:
            return False
        return self.mode == "always" or not self._competition.is_parked(n_seq)

    def plan(
        self, requests: Sequence[Request], n_ctx: int, max_batch_tokens: int
    ) -> list[list[int]]:
        """Draft tokens to verify for each request; [] means its anchor alone."""
        self._draft_s = 0.0
        if self.proposer is None or self.mode == "off" or self.held:
            return [[] for _ in requests]
        rooms = [request.n_draft_room(n_ctx) for request in requests]
        if self.mode == "always":
            return self._plan_always(requests, rooms, max_batch_tokens)
        return self._plan_auto(requests, rooms, max_batch_tokens)

    def _plan_always(
        self, requests: Sequence[Request], rooms: Sequence[int], max_batch_tokens: int
    ) -> list[list[int]]:
        is_looked_up = self.proposer == "lookup" or (self._verify_len == 0 and self._n_lookup > 0)
        looked = self._look_up(requests) if is_looked_up else [NOTHING] * len(requests)
        self._record("lookup", requests, looked)
        if self.proposer == "lookup":
            drafts = looked
        elif any(rooms) and not self.released:
            drafts = self._draft(requests)
            self._record("drafter", requests[: len(drafts)], drafts)  # one that fails has none
        else:
            drafts = []
        if not drafts:
            return [[] for _ in requests]
        if self.recorder is not None and self.proposer is not None:
            self.recorder.take(requests, [self.proposer] * len(requests))
        wanted = self._n_max if self._verify_len is None else self._verify_len
        # An equal share of the pass for each, its anchor left out.
        most = min(wanted, max_batch_tokens // len(requests) - 1)
        return [d.tokens[: min(room, most)] for d, room in zip(drafts, rooms, strict=True)]

    def _plan_auto(
        self, requests: Sequence[Request], rooms: Sequence[int], max_batch_tokens: int
    ) -> list[list[int]]:
        looked = self._look_up(requests) if self._n_lookup else [NOTHING] * len(requests)
        rows = [self._row(*each) for each in zip(looked, rooms, strict=True)]
        wanted = self._competition.wants(
            [request.id for request in requests],
            rows,
            depth=max([request.n_past for request in requests]),
            max_batch_tokens=max_batch_tokens,
            may_draft=self.proposer == "drafter" and not self.released and any(rooms),
        )
        drafts = self._draft([requests[r] for r in wanted]) if wanted else []
        drafted = dict(zip(wanted, drafts, strict=False))  # a drafter that fails has none
        for r, draft in drafted.items():  # the two judge each other
            drafted[r] = self._survival.against(draft, looked[r])
            looked[r] = self._survival.against(looked[r], draft)
        self._record("lookup", requests, looked)
        self._record("drafter", [requests[r] for r in drafted], list(drafted.values()))
        if not wanted and self.recorder is None and not any(rows):
            return [[] for _ in requests]
        choice = self._competition.choose(
            {r: self._row(draft, rooms[r]) for r, draft in drafted.items()},
            {r: self._row(looked[r], rooms[r]) for r in drafted},
        )
        if self.recorder is not None:
            self.recorder.weigh(choice.alternatives, choice.plan)
            names = ["drafter" if is_drafts else "lookup" for is_drafts in choice.takes_draft]
            self.recorder.take(requests, names)
        return [
            (drafted[r] if choice.takes_draft[r] else looked[r]).tokens[:n]
            for r, n in enumerate(choice.plan.verify_lens)
        ]

    def _row(self, draft: DraftSignals, room: int) -> list[float]:
        return self._survival.survival(draft, SURVIVAL_FLOOR)[:room] if draft.tokens else []

    def learn(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        """Take the tokens that a request emitted from `position` on, drafted or not."""
        if self.proposer is not None:
            self._later.append((self._resolve, (request, position, token_ids)))

    def finish(self, request: Request) -> None:
        """Take what the text said of the drafts that its end leaves undecided."""
        self._settle()
        self._competition.finish(request.id)
        for signals, n_correct, n_seen in request.ledger.flush():
            self._survival.observe(signals, n_correct, n_seen)

    def observe_round(
        self, batch_tokens: int, depth: int, *, round_s: float, verify_s: float, pass_s: float
    ) -> None:
        """Take the measured times of one round, in seconds.

        verify_s: of that, evaluating and drawing; pass_s: of that, llama.cpp, as a profile has it.
        """
        if self.proposer is not None:
            # What is left of verify_s, the draws, costs the same for each token emitted, drafted or
            # not: it favours no plan, and is no load of the machine.
            self._unheard_s += pass_s
            if batch_tokens != self._heard_tokens or self._unheard_s >= OBSERVE_S:
                self._heard_tokens, self._unheard_s = batch_tokens, 0.0
                self._later.append((self._cost.observe_verify, (batch_tokens, depth, pass_s)))
                if self._n_rounds > 0:  # the first one indexes the prompt, and prepares what stays
                    other_s = max(round_s - self._draft_s - verify_s, 0.0)  # differences round off
                    self._later.append((self._cost.observe_other, (other_s,)))
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
        self._competition.correct_costs()

    def _resolve(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        for signals, n_correct, n_seen in request.ledger.resolve(position, token_ids):
            self._survival.observe(signals, n_correct, n_seen)

    def _draft(self, requests: Sequence[Request]) -> list[DraftSignals]:
        """One drafter pass; nothing when it failed, and then never again."""
        start = time.perf_counter()
        try:
            drafts = self._drafter.draft(
                [request.seq_id for request in requests],
                [request.tokens[-1] for request in requests],
            )
        except DecodeError as error:
            self._lose_drafter(f"the drafter failed: {error}")
            return []
        draft_s = self._draft_s = time.perf_counter() - start
        if self.mode == "auto" and self._competition.is_probe:
            self._competition.observe_probe(draft_s, len(requests))
        else:
            self._later.append((self._cost.observe_draft, (len(requests), draft_s)))
        signals = [
            DraftSignals(d.tokens, d.confidence or None, d.certainty, recent=r.ledger.recent)
            for d, r in zip(drafts, requests, strict=True)
        ]
        if self.recorder is not None:
            self.recorder.draft(draft_s)
        self._watch_silence(signals)
        return signals

    def _look_up(self, requests: Sequence[Request]) -> list[DraftSignals]:
        signals = []
        for request in requests:
            if request.lookup is None:
                raise ValueError("a request without a lookup index cannot be looked up")
            found = request.lookup.propose_behind(request.tokens, self._n_lookup)
            ledger = request.ledger
            signals.append(looked_up(found, ledger.recent_lookup, ledger.recent_copies))
        return signals

    def _record(
        self, proposer: Proposer, requests: Sequence[Request], drafts: Sequence[DraftSignals]
    ) -> None:
        if self.recorder is not None:
            survival = [self._survival.survival(d) if d.tokens else [] for d in drafts]
            self.recorder.propose(proposer, requests, drafts, survival)
        for request, signals in zip(requests, drafts, strict=True):
            if signals.tokens:
                request.stats.n_drafted += len(signals.tokens)
                self._later.append((request.ledger.record, (len(request.tokens), signals)))

    def _watch_silence(self, drafts: Sequence[DraftSignals]) -> None:
        if drafts[0].tokens or any(draft.tokens for draft in drafts):
            self._n_silent = 0
            return
        self._n_silent += 1
        if self._n_silent == SILENT_ROUNDS:
            self._lose_drafter(f"the drafter proposed nothing in {SILENT_ROUNDS} rounds")
