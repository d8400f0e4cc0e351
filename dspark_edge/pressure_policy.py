"""What is given up now, and when it comes back: readings go in, actions with a reason come out.

Owns the order and its timers. Refuses to know clocks, sensors, where a pressure begins
(pressure_signals.py), and how an action is carried out (governor.py, between rounds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .battery import BatteryBar
from .device import Reading
from .pressure import RELEASES, STEPS, Action, Limits, Step
from .pressure_signals import Signal, Signals

SETTLE_S = 2.0  # between two steps, so that the first can show in the readings
USUAL_DRAFT = 8  # draft tokens per sequence: "shorten" takes its share of so many at most
REARM_REFUSE_S = 10.0  # a refusal is felt at once, so it goes first


@dataclass(slots=True)
class _Taken:
    """A step in force, the name of the signal behind it, and since when nothing needs it."""

    action: Action
    cause: str
    clear_since_s: float | None = None


class PressurePolicy:
    """Takes steps in the order of STEPS while pressure lasts, lifts them in reverse after it.

    A step is taken at the first observation that needs it, the next one SETTLE_S later at the
    earliest (at once where memory is scarce); only steps that relieve the pressure are taken. The
    highest step is lifted after nothing has needed it for its re-arm time. What is not told is no
    pressure. Deterministic: the same observations give the same actions.
    """

    __slots__ = (
        "_bar",
        "_changed_s",
        "_now_s",
        "_signals",
        "_steps",
        "_taken",
        "limits",
    )

    def __init__(self, limits: Limits | None = None, *, steps: Sequence[Step] = STEPS) -> None:
        """steps: those that can be taken; others would give up what is not there."""
        self.limits = limits or Limits()
        self._steps = tuple(step for step in STEPS if step in steps)
        self._taken: dict[Step, _Taken] = {}
        self._now_s = -math.inf
        self._changed_s = -math.inf
        self._signals = Signals(self.limits)
        self._bar = BatteryBar(self.limits)

    @property
    def in_force(self) -> tuple[Action, ...]:
        """The actions in force, in the order of STEPS, each with the reason it was taken for."""
        taken, bar = self._taken.copy(), self._bar.action  # other threads ask while steps change
        steps = tuple(taken[step].action for step in STEPS if step in taken)
        return steps if bar is None else (*steps, bar)

    @property
    def bar(self) -> float:
        """How many times plain decoding's tokens per second a draft must promise; 1: no bar."""
        return self._bar.height

    def max_batch_tokens(self, n_seq: int, n_draft: int, n_batch: int) -> int:
        """batch_tokens that a round of n_seq sequences may use, of n_batch that fit one pass.

        n_draft: draft tokens of each as a rule; some rounds may have more. The scheduler admits by
        survival, so a smaller budget cuts the least certain drafts.
        """
        if "park" in self._taken:
            return n_seq
        if "shorten" in self._taken:
            n_kept = math.floor(self.limits.batch_factor * n_seq * min(n_draft, USUAL_DRAFT))
            return min(n_batch, n_seq + n_kept)
        return n_batch

    def retry_s(self, now_s: float) -> int | None:
        """Whole seconds until a refused request may come back; None: none is refused."""
        refusal = self._taken.get("refuse")
        if refusal is None:
            return None
        since_s = refusal.clear_since_s  # once: other threads ask while it changes
        waited_s = 0.0 if since_s is None else now_s - since_s
        return max(1, math.ceil(REARM_REFUSE_S - waited_s))

    def observe(
        self,
        reading: Reading,
        now_s: float,
        *,
        queue_len: int = 0,
        n_active: int = 0,
        slowdown: float | None = None,
    ) -> list[Action]:
        """Take one look at the machine; returns what changes now, in order. About once a second.

        now_s: of a clock that never goes back (an earlier time counts as the last one). slowdown:
        step time measured over profiled; it says nothing while no sequence is active.
        """
        now_s = self._now_s = max(now_s, self._now_s)
        signals = self._signals.at(
            reading, now_s, queue_len=queue_len, n_active=n_active, slowdown=slowdown
        )
        self._note_needs(signals, now_s)
        actions = self._take(signals, now_s) or self._lift(signals, now_s)
        return actions + self._bar.move(reading, now_s)

    # ------------------------------------------------------------ steps

    def _note_needs(self, signals: Sequence[Signal], now_s: float) -> None:
        needed = {step for s in signals if s.state != "off" for step in s.steps}
        for step, taken in self._taken.items():
            if step in needed:
                taken.clear_since_s = None
            elif taken.clear_since_s is None:
                taken.clear_since_s = now_s

    def _take(self, signals: Sequence[Signal], now_s: float) -> list[Action]:
        pressing = sorted((s for s in signals if s.state == "on"), key=lambda s: not s.is_urgent)
        actions = []
        for step in self._steps:
            cause = next((s for s in pressing if step in s.steps), None)
            if step in self._taken or cause is None:
                continue
            if not cause.is_urgent and now_s - self._changed_s < SETTLE_S:
                break
            action = Action(step, True, cause.text, self._value(step))
            self._taken[step] = _Taken(action, cause.name)
            self._changed_s = now_s
            actions.append(action)
        return actions

    def _lift(self, signals: Sequence[Signal], now_s: float) -> list[Action]:
        if not self._taken or now_s - self._changed_s < SETTLE_S:
            return []
        step = max(self._taken, key=STEPS.index)
        taken = self._taken[step]
        if taken.clear_since_s is None or now_s - taken.clear_since_s < self._rearm_s(step):
            return []
        text = next((s.text for s in signals if s.name == taken.cause), None)
        text = text or f"{taken.cause} is no longer told"
        del self._taken[step]
        self._changed_s = now_s
        return [Action(step, False, f"{text}, for {now_s - taken.clear_since_s:.0f} s")]

    def _rearm_s(self, step: Step) -> float:
        if step == "refuse":
            return REARM_REFUSE_S
        return self.limits.rearm_release_s if step in RELEASES else self.limits.rearm_s

    def _value(self, step: Step) -> float:
        return {"shorten": self.limits.batch_factor, "refuse": REARM_REFUSE_S}.get(step, 0.0)
