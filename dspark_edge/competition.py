"""Who proposes this round, for which sequences, and how much of it is verified.

Lookup is free and the drafter's pass has to earn its time, so lookup is asked first. The engine and
the replay simulator both decide by this. Refuses to know: tokens, models and clocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .cost import DEPTH_STEP
from .parking import Parking
from .probing import PROBE_DRAFTS, BlockHistory, ProbePrice, Probes, Row
from .scheduler import Costs, RoundPlan, choose_lengths
from .worth import Worth

SETTLED_ROUNDS = 16  # with as many sequences, before those that missed drafts get them again
MIN_GAIN = 1.05  # that verifying drafts must promise, over verifying none


@dataclass(slots=True)
class Choice:
    """takes_draft: for each sequence, whether its tokens come from the drafter rather than lookup.

    alternatives: nothing verified, the best without the drafter, and the best with it if it ran.
    """

    plan: RoundPlan
    takes_draft: list[bool]
    alternatives: list[RoundPlan]


class _Times(dict[int, float]):
    """Seconds of a target pass by batch_tokens, at one depth; each is asked for once.

    Kept until costs are corrected: to ask for them anew in each round took half of choosing.
    """

    __slots__ = ("_costs", "_depth")

    def __init__(self, costs: Costs, depth: int) -> None:
        super().__init__()
        self._costs = costs
        self._depth = depth

    def __missing__(self, batch_tokens: int) -> float:
        seconds = self[batch_tokens] = self._costs.verify_s(batch_tokens, self._depth)
        return seconds


@dataclass(slots=True)
class _Round:
    """What is known of the round between asking the drafter and choosing."""

    keys: Sequence[Hashable]
    lookup: Sequence[Row]
    verify_s: _Times
    max_batch_tokens: int
    without: RoundPlan | None = None  # the best plan without the drafter, once it is needed


class Competition:
    """Each round: `wants` says whom to draft for, then `choose` what to verify.

    bar: how many times plain decoding's speed drafts must promise (1 on mains power). typical: rows
    of an offline calibration; they say from the start whether drafting can pay here.
    """

    __slots__ = (
        "_costs",
        "_current",
        "_has_drafter",
        "_history",
        "_is_probing",
        "_n_alike",
        "_n_behind",
        "_n_rounds",
        "_n_seq",
        "_parkings",
        "_probe_price",
        "_probes",
        "_round",
        "_times",
        "_worth",
        "bar",
    )

    def __init__(
        self, costs: Costs, *, has_drafter: bool = True, typical: Sequence[Row] = ()
    ) -> None:
        self.bar = 1.0
        self._costs = costs
        self._has_drafter = has_drafter
        self._history = BlockHistory(typical)
        # By request where one runs alone, else by number of sequences: their costs differ.
        self._parkings: dict[Hashable, Parking] = {}
        self._current: Parking | None = None
        self._worth: dict[Hashable, Worth] = {}
        self._probes = Probes()
        self._probe_price = ProbePrice(costs)
        self._is_probing = False
        self._n_alike = 0  # rounds with as many sequences before this one
        self._n_behind = 0  # sequences for which a draft of this round begins with an injection
        self._n_seq = 1
        self._n_rounds = 0
        self._round: _Round | None = None
        self._times: dict[int, _Times] = {}

    @property
    def reason(self) -> str:
        """Whether the drafter drafts, and why."""
        reason = (self._current or self._new_parking(self._n_seq)).reason
        n_parked = sum(worth.is_parked for worth in list(self._worth.values()))  # other threads ask
        return f"{reason}, {n_parked} sequences parked" if n_parked else reason

    def is_parked(self, n_seq: int) -> bool:
        """Whether the drafter is parked where so many sequences begin to run."""
        return (self._parkings.get(n_seq) or self._new_parking(n_seq)).state == "parked"

    @property
    def is_probe(self) -> bool:
        """Whether the draft of this round first injects what came while a sequence had none."""
        return self._n_behind > 0

    def wants(
        self,
        keys: Sequence[Hashable],
        lookup: Sequence[Row],
        *,
        depth: int,
        max_batch_tokens: int,
        may_draft: bool = True,
    ) -> list[int]:
        """Indices of the sequences to draft for, given what lookup offers each of them.

        keys: names of the sequences. depth: tokens in the deepest cache. Where neither proposes
        anything there is nothing to choose: the next round may begin.
        """
        n_seq = len(keys)
        self._n_alike = self._n_alike + 1 if n_seq == self._n_seq else 0
        self._n_seq, self._n_behind = n_seq, 0
        self._round = _Round(keys, lookup, self._times_at(depth), max_batch_tokens)
        if not self._has_drafter or not may_draft or max_batch_tokens <= n_seq:
            return []
        parking = self._current = self._parking(keys)
        self._n_rounds += 1
        worths = [self._worth.setdefault(key, Worth()) for key in keys]
        for worth in worths:
            worth.pass_round()
        self._is_probing = parking.state == "parked"
        if self._is_probing:  # one sequence tells enough, and each in turn
            self._probes.every = self._probe_price.every(n_seq, PROBE_DRAFTS)
            newcomer = next((r for r, worth in enumerate(worths) if worth.is_unknown), None)
            probed = self._probes.wants(keys, newcomer)
            self._n_behind = int(probed is not None and self._probes.is_first)
            return [] if probed is None else [probed]
        wanted = self._worth_drafting(self._round)
        left_out = [r for r in range(n_seq) if r not in wanted]
        period, phase = divmod(self._n_rounds, self._probe_price.every(n_seq, 1))
        if phase == 0 and left_out:
            wanted = sorted([*wanted, left_out[period % len(left_out)]])
        elif self._n_alike < SETTLED_ROUNDS:
            # Where requests come and go, the state may differ with each: injecting what the others
            # have missed would cost more than the few rounds until the next change can win.
            wanted = [r for r in wanted if not worths[r].is_behind]
        self._n_behind = sum(worths[r].is_behind for r in wanted)
        return wanted

    def _worth_drafting(self, now: _Round) -> list[int]:
        """The sequences whose drafts usually gain more than lookup offers and than they cost."""
        n_seq, tps = len(now.keys), self._without(now).tps
        own_s = self._costs.draft_s(n_seq) - self._costs.draft_s(n_seq - 1) if n_seq > 1 else 0.0
        looked = [self._worth_of(row, now) for row in now.lookup]
        chosen, gain, is_known = [], 0.0, True
        for r, key in enumerate(now.keys):
            worth = self._worth.setdefault(key, Worth())
            is_new = worth.n_drafts == 0
            if worth.pays(tps * max(own_s, 0.0)) and (is_new or worth.mean >= looked[r]):
                chosen.append(r)
                gain += worth.mean - looked[r]
                is_known = is_known and not is_new
        if is_known and any(looked) and gain <= tps * self._costs.draft_s(len(chosen)):
            return []  # lookup has found so much that a pass for what is left would not pay
        return chosen

    def choose(self, drafts: Mapping[int, Row], lookup: Mapping[int, Row] | None = None) -> Choice:
        """What to verify; drafts: rows of the sequences that were drafted for, by their index.

        lookup: rows of lookup that the drafts changed. Raises ValueError unless `wants` has begun
        the round.
        """
        now, self._round = self._round, None
        if now is None:
            raise ValueError("no round has begun; ask whom to draft for first")
        before = self._without(now)
        if lookup:
            rows = list(now.lookup)
            for r, row in lookup.items():
                rows[r] = row
            now.lookup, now.without = rows, None
        without = self._without(now)
        plain = self._weigh([()] * len(now.keys), now) if any(now.lookup) else without
        takes_draft = [False] * len(now.keys)
        if not drafts:
            return Choice(without, takes_draft, [plain, without])
        rows = list(now.lookup)
        for r, row in drafts.items():
            worth, rival = self._worth_of(row, now), self._worth_of(rows[r], now)
            self._worth.setdefault(now.keys[r], Worth()).observe(worth)
            self._history.add(now.keys[r], row)
            if row and (not rows[r] or worth >= rival):
                takes_draft[r], rows[r] = True, row
        plan = self._weigh(rows, now, draft_s=self._costs.draft_s(len(drafts)))
        gain = plan.tps / (self.bar * before.tps)  # what a draft tells of lookup is its gain too
        self._observe(drafts, gain, plan.expected_s, now)
        return Choice(plan, takes_draft, [plain, without, plan])

    def _observe(self, drafts: Mapping[int, Row], gain: float, seconds: float, now: _Round) -> None:
        """Take the gain of a round; a probe of one of several sequences stands for all of them."""
        n_seq = len(now.keys)
        if self._is_probing and n_seq > 1:
            (row,) = drafts.values()
            gain, seconds = self._gain_of(row, n_seq)
        is_whole = not self._is_probing or self._probes.is_last
        self._parking(now.keys).observe(gain, seconds, len(drafts), is_whole=is_whole)

    def observe_probe(self, draft_s: float, n_drafts: int = 1) -> None:
        """Take the seconds of a draft that began with an injection, for so many sequences."""
        self._probe_price.observe(draft_s, self._n_seq, n_drafts, self._n_behind)

    def lose_drafter(self) -> None:
        """There is no drafter any more: nothing is drafted from the next round on."""
        self._has_drafter = False

    def finish(self, key: Hashable) -> None:
        """The sequence has ended."""
        self._worth.pop(key, None)
        self._parkings.pop((1, key), None)
        self._history.finish(key)

    def correct_costs(self) -> None:
        """The costs have changed since the last round."""
        self._times.clear()

    # ------------------------------------------------------------ numbers

    def _times_at(self, depth: int) -> _Times:
        bucket = depth // DEPTH_STEP  # costs are the same all over it
        if bucket not in self._times:
            self._times[bucket] = _Times(self._costs, depth)
        return self._times[bucket]

    def _without(self, now: _Round) -> RoundPlan:
        if now.without is None:
            now.without = self._weigh(now.lookup, now)
        return now.without

    def _weigh(self, rows: Sequence[Row], now: _Round, *, draft_s: float = 0.0) -> RoundPlan:
        return choose_lengths(
            rows,
            now.verify_s.__getitem__,
            draft_s=draft_s,
            other_s=self._costs.other_s,
            max_batch_tokens=now.max_batch_tokens,
            min_gain=max(MIN_GAIN, self.bar),
        )

    def _worth_of(self, row: Row, now: _Round) -> float:
        """The most tokens that a row can gain, the time of verifying them priced in tokens."""
        n_seq, tps, best = len(now.keys), self._without(now).tps, 0.0
        anchors_s = now.verify_s[n_seq]
        for n, gained in enumerate(accumulate(row), start=1):
            extra_s = now.verify_s[n_seq + n] - anchors_s
            best = max(best, gained - tps * extra_s)
        return best

    def _parking(self, keys: Sequence[Hashable]) -> Parking:
        n_seq = len(keys)
        name = n_seq if n_seq > 1 else (1, keys[0])
        if name not in self._parkings:
            self._parkings[name] = self._new_parking(n_seq)
        return self._parkings[name]

    def _new_parking(self, n_seq: int) -> Parking:
        """A state for this many sequences, begun with what recent blocks promise there."""
        parking, rows = Parking(), self._history.rows()
        if len(rows) >= parking.min_drafts:
            basis = "by recent requests" if self._history.is_live else "by its calibration"
            parking.start([self._gain_of(row, n_seq) for row in rows], basis)
        return parking

    def _gain_of(self, row: Row, n_seq: int) -> tuple[float, float]:
        """Over plain decoding, if all of n_seq sequences had drafts like this one; and seconds."""
        costs = self._costs
        fixed_s = costs.draft_s(n_seq) + costs.other_s
        plain_s = costs.verify_s(n_seq, 0)
        best, seconds = 1.0 / (fixed_s + plain_s), fixed_s + plain_s
        for n, gained in enumerate(accumulate(row), start=1):
            wider_s = fixed_s + costs.verify_s(n_seq * (1 + n), 0)
            if (1.0 + gained) / wider_s > best:
                best, seconds = (1.0 + gained) / wider_s, wider_s
        return best * (plain_s + costs.other_s) / self.bar, seconds
