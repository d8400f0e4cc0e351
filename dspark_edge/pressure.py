"""What is given up while the machine is short of memory, coolness or time, and when it comes back.

Owns the order of giving up, its limits and its timers: readings go in,
actions with a reason come out. Nothing in that order ends a running conversation.
Refuses to know clocks, sensors, and how an action is carried out (the engine does, between rounds).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .device import Reading

Step = Literal["shorten", "park", "release_context", "release_weights", "shrink_idle", "refuse"]
STEPS: tuple[Step, ...] = (
    "shorten",  # verify less: see PressurePolicy.max_batch_tokens
    "park",  # stop drafting
    "release_context",  # free the drafter's context
    "release_weights",  # free the drafter's weights
    "shrink_idle",  # keep the caches of idle sessions small
    "refuse",  # turn new requests away, with a time to come back
)
RELEASES: tuple[Step, ...] = ("release_context", "release_weights", "shrink_idle")

# The steps that relieve each pressure, so that nothing is given up in vain: heat does not bring the
# drafter's memory down, and parking a drafter that pays would make the queue longer.
LOW_MEMORY = STEPS[:5]
SCARCE_MEMORY = STEPS
HEAT: tuple[Step, ...] = ("shorten", "park")
SLOWDOWN: tuple[Step, ...] = ("shorten", "park")
QUEUE: tuple[Step, ...] = ("shorten", "refuse")

MB = 10**6
MAX_FLOOR_SHARE = 1 / 8  # a small container's floor must not be most of it
SCARCE_SHARE = 0.5  # of the floor: then steps do not wait for each other, and requests are refused
CLEAR_RATIO = 1.25  # free memory over its floor at which the pressure is gone
CLEAR_C = 5.0  # degrees below the limit at which heat is gone
CLEAR_SLOWDOWN = 0.8  # of the limit
CLEAR_QUEUE = 0.5  # of the limit
CLEAR_PERCENT = 5.0  # battery percent above the limit
SLOW_FOR_S = 3.0  # one slow round is no pressure
SETTLE_S = 2.0  # between two steps, so that the first can show in the readings
REARM_REFUSE_S = 10.0  # a refusal is felt at once, so it goes first

WHAT: dict[str, str] = {  # is given up, in words
    "shorten": "shorter drafts are verified",
    "park": "drafting is parked",
    "release_context": "the drafter's context is released",
    "release_weights": "the drafter's weights are released",
    "shrink_idle": "caches of idle sessions are emptied",
    "refuse": "new requests are refused",
    "raise_bar": "drafts must promise more",
}


@dataclass(slots=True, frozen=True)
class Limits:
    """When pressure begins, and how long it must be gone before what was given up comes back.

    min_free_share: of the total, where that is more than min_free_*_bytes; never above an eighth.
    trip_margin_c: degrees below the trip point. max_slowdown: measured over profiled step time.
    max_queue: waiting requests for each active one. batch_factor: share of draft tokens that may be
    verified when shortened. battery_bar, low_battery_bar: how many times plain decoding's speed a
    draft must promise on battery (assumed, not measured: see PITFALLS 27). drafter_*_bytes: what
    loading the drafter again takes; it waits until that is free beyond the floor in each memory,
    for in which one the drafter lies is not known here.

    Raises ValueError when a number is out of range.
    """

    min_free_ram_bytes: int = 300 * MB
    min_free_vram_bytes: int = 200 * MB
    min_free_share: float = 0.02
    trip_margin_c: float = 5.0
    max_slowdown: float = 1.5
    max_queue: int = 4
    batch_factor: float = 0.5
    battery_bar: float = 1.1
    low_battery_bar: float = 1.25
    low_battery_percent: float = 20.0
    rearm_s: float = 30.0
    rearm_release_s: float = 120.0
    drafter_context_bytes: int = 0
    drafter_weights_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.batch_factor <= 1.0:
            raise ValueError(f"batch_factor {self.batch_factor} is outside 0..1")
        if not 0.0 <= self.min_free_share <= MAX_FLOOR_SHARE:
            raise ValueError(
                f"min_free_share {self.min_free_share} is outside 0..{MAX_FLOOR_SHARE}"
            )
        if not 1.0 <= self.battery_bar <= self.low_battery_bar:
            raise ValueError(
                f"battery_bar {self.battery_bar} must be at least 1 and at most "
                f"low_battery_bar {self.low_battery_bar}"
            )
        if not self.max_slowdown * CLEAR_SLOWDOWN >= 1.0:
            raise ValueError(
                f"max_slowdown {self.max_slowdown} is below {1 / CLEAR_SLOWDOWN}; "
                "an undisturbed machine would never clear it"
            )
        if self.max_queue < 1:
            raise ValueError(f"max_queue {self.max_queue} must be at least 1")


@dataclass(slots=True, frozen=True)
class Action:
    """One transition: `kind` comes into force (is_on) or is lifted, and why, in words.

    value: batch_factor of "shorten", seconds to come back of "refuse", the bar of "raise_bar".
    "raise_bar" is not a step: only the power source moves it, and on again with another value means
    that the bar is there now.
    """

    kind: Step | Literal["raise_bar"]
    is_on: bool
    reason: str
    value: float = 0.0

    @property
    def text(self) -> str:
        """E.g. "drafting is parked: free memory 210 MB is below 300 MB"; "no longer: ..."."""
        text = f"{WHAT[self.kind]}: {self.reason}"
        return text if self.is_on else f"no longer: {text}"


@dataclass(slots=True, frozen=True)
class _Signal:
    """One pressure now. "hold": not enough to take a step, too much to lift one."""

    name: str
    steps: tuple[Step, ...]
    state: Literal["on", "hold", "off"]
    text: str
    is_urgent: bool = False


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
        "_bar_lower_since_s",
        "_changed_s",
        "_now_s",
        "_slow_since_s",
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
        self._slow_since_s: float | None = None
        self._bar: Action | None = None
        self._bar_lower_since_s: float | None = None

    @property
    def in_force(self) -> tuple[Action, ...]:
        """The actions in force, in the order of STEPS, each with the reason it was taken for."""
        steps = tuple(self._taken[step].action for step in STEPS if step in self._taken)
        return steps if self._bar is None else (*steps, self._bar)

    @property
    def bar(self) -> float:
        """How many times plain decoding's tokens per second a draft must promise; 1: no bar."""
        return 1.0 if self._bar is None else self._bar.value

    def max_batch_tokens(self, n_seq: int, n_draft: int) -> int:
        """batch_tokens that a round of n_seq sequences with n_draft draft tokens each may use.

        The scheduler admits by survival, so a smaller budget cuts the least certain drafts.
        """
        share = self.limits.batch_factor if "shorten" in self._taken else 1.0
        if "park" in self._taken:
            share = 0.0
        return n_seq + math.floor(share * n_seq * n_draft)

    def retry_s(self, now_s: float) -> int | None:
        """Whole seconds until a refused request may come back; None: none is refused."""
        refusal = self._taken.get("refuse")
        if refusal is None:
            return None
        since_s = now_s if refusal.clear_since_s is None else refusal.clear_since_s
        return max(1, math.ceil(REARM_REFUSE_S - (now_s - since_s)))

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
        signals = [
            *self._memory_signals(reading),
            *self._heat_signals(reading),
            *self._slowdown_signals(now_s, slowdown if n_active else None),
            *self._queue_signals(queue_len, n_active),
        ]
        self._note_needs(signals, now_s)
        actions = self._take(signals, now_s) or self._lift(signals, now_s)
        return actions + self._move_bar(reading, now_s)

    # ------------------------------------------------------------ steps

    def _note_needs(self, signals: Sequence[_Signal], now_s: float) -> None:
        needed = {step for s in signals if s.state != "off" for step in s.steps}
        for step, taken in self._taken.items():
            if step in needed:
                taken.clear_since_s = None
            elif taken.clear_since_s is None:
                taken.clear_since_s = now_s

    def _take(self, signals: Sequence[_Signal], now_s: float) -> list[Action]:
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

    def _lift(self, signals: Sequence[_Signal], now_s: float) -> list[Action]:
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

    # ------------------------------------------------------------ signals

    def _memory_signals(self, reading: Reading) -> Iterator[_Signal]:
        if reading.ram_free_bytes is not None:
            floor = self._floor(self.limits.min_free_ram_bytes, reading.ram_total_bytes)
            yield from self._of_memory("free memory", reading.ram_free_bytes, floor)
        for gpu in reading.gpus:
            if not gpu.is_shared:
                floor = self._floor(self.limits.min_free_vram_bytes, gpu.total_bytes)
                yield from self._of_memory(f"free memory of {gpu.name}", gpu.free_bytes, floor)

    def _floor(self, min_bytes: int, total_bytes: int | None) -> float:
        if total_bytes is None:
            return min_bytes
        floor = max(min_bytes, self.limits.min_free_share * total_bytes)
        return min(floor, MAX_FLOOR_SHARE * total_bytes)

    def _of_memory(self, name: str, free: int, floor: float) -> Iterator[_Signal]:
        scarce = SCARCE_SHARE * floor
        yield _falling(f"{name} (scarce)", SCARCE_MEMORY, name, free, scarce, is_urgent=True)
        yield _falling(name, LOW_MEMORY, name, free, floor)
        # The drafter runs on its context and its weights, so loading starts with room for both.
        context_bytes = self.limits.drafter_context_bytes
        both_bytes = context_bytes + self.limits.drafter_weights_bytes
        rooms: tuple[tuple[Step, int], ...] = (
            ("release_context", context_bytes),
            ("release_weights", both_bytes),
        )
        for step, room in rooms:
            has_room = free >= CLEAR_RATIO * floor + room
            yield _Signal(f"{name} for {step}", (step,), "off" if has_room else "hold", "")

    def _heat_signals(self, reading: Reading) -> Iterator[_Signal]:
        at, trip_c = reading.temperature_c, reading.trip_c
        limit_c = None if trip_c is None else trip_c - self.limits.trip_margin_c
        is_hot = at is not None and limit_c is not None and at >= limit_c
        if reading.is_throttled and not is_hot:
            where = "" if at is None else f" at {at:.1f} C"
            yield _Signal("temperature", HEAT, "on", f"the device is throttled{where}")
        elif at is not None and limit_c is not None:
            if is_hot:
                text = f"temperature {at:.1f} C has reached {limit_c:.1f} C"
                yield _Signal("temperature", HEAT, "on", f"{text} (trip point {trip_c:.1f} C)")
            else:
                clear_c = limit_c - CLEAR_C
                text = f"temperature {at:.1f} C is below {clear_c:.1f} C"
                yield _Signal("temperature", HEAT, "hold" if at >= clear_c else "off", text)
        elif reading.is_throttled is not None:
            yield _Signal("temperature", HEAT, "off", "the device is not throttled")

    def _slowdown_signals(self, now_s: float, slowdown: float | None) -> Iterator[_Signal]:
        most, clear = self.limits.max_slowdown, CLEAR_SLOWDOWN * self.limits.max_slowdown
        if slowdown is None or slowdown <= most:
            self._slow_since_s = None
        elif self._slow_since_s is None:
            self._slow_since_s = now_s
        if slowdown is None:
            return
        text = f"rounds take {slowdown:.2f}x their profiled time"
        if self._slow_since_s is not None:
            slow_s = now_s - self._slow_since_s
            text = f"{text}, above {most:.2f}x for {slow_s:.0f} s"
            yield _Signal("step time", SLOWDOWN, "on" if slow_s >= SLOW_FOR_S else "hold", text)
        else:
            state: Literal["hold", "off"] = "hold" if slowdown > clear else "off"
            yield _Signal("step time", SLOWDOWN, state, f"{text}, below {clear:.2f}x")

    def _queue_signals(self, queue_len: int, n_active: int) -> Iterator[_Signal]:
        most = self.limits.max_queue * max(1, n_active)
        clear = CLEAR_QUEUE * most
        if queue_len > most:
            text = f"{queue_len} requests wait, more than {most} for {n_active} active"
            yield _Signal("queue", QUEUE, "on", text)
        else:
            text = f"{queue_len} requests wait, at most {clear:.0f}"
            yield _Signal("queue", QUEUE, "hold" if queue_len > clear else "off", text)

    # ------------------------------------------------------------ power source

    def _move_bar(self, reading: Reading, now_s: float) -> list[Action]:
        """Battery: drafts must promise more, so that fewer tokens are verified in vain."""
        wanted, reason = self._wanted_bar(reading)
        if wanted >= self.bar:
            self._bar_lower_since_s = None
        if wanted == self.bar:
            return []
        if wanted < self.bar:
            if self._bar_lower_since_s is None:
                self._bar_lower_since_s = now_s
            lower_s = now_s - self._bar_lower_since_s
            if lower_s < self.limits.rearm_s:
                return []
            reason = f"{reason}, for {lower_s:.0f} s"
        self._bar_lower_since_s = None
        action = Action("raise_bar", wanted > 1.0, reason, wanted)
        self._bar = action if action.is_on else None
        return [action]

    def _wanted_bar(self, reading: Reading) -> tuple[float, str]:
        if not reading.on_battery:
            return 1.0, "not on battery"
        if reading.battery_percent is None:
            return self.limits.battery_bar, "on battery"
        limit = self.limits.low_battery_percent
        if self.bar >= self.limits.low_battery_bar:
            limit += CLEAR_PERCENT
        text = f"on battery at {reading.battery_percent:.0f} %"
        if reading.battery_percent < limit:
            return self.limits.low_battery_bar, f"{text}, below {limit:.0f} %"
        return self.limits.battery_bar, text


def _falling(
    name: str,
    steps: tuple[Step, ...],
    subject: str,
    free_bytes: int,
    floor_bytes: float,
    *,
    is_urgent: bool = False,
) -> _Signal:
    """Free memory against its floor. Rounded down, as what is left must not look like more."""
    text = f"{subject} {free_bytes // MB} MB is"
    if free_bytes < floor_bytes:
        text = f"{text} below {floor_bytes / MB:.0f} MB"
        return _Signal(name, steps, "on", text, is_urgent)
    clear_bytes = CLEAR_RATIO * floor_bytes
    state: Literal["hold", "off"] = "hold" if free_bytes < clear_bytes else "off"
    return _Signal(name, steps, state, f"{text} above {clear_bytes / MB:.0f} MB", is_urgent)
