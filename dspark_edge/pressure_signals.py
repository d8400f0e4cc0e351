"""Which pressures a reading, the rounds and the queue show, with the numbers in words.

Owns the thresholds: where a pressure begins, where it is gone, and which steps relieve it. Refuses
to know what is in force, and when a step is taken or lifted (pressure_policy.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .device import Reading
from .pressure import CLEAR_SLOWDOWN, MAX_FLOOR_SHARE, MB, STEPS, Limits, Step

# The steps that relieve each pressure, so that nothing is given up in vain: heat does not bring the
# drafter's memory down, and parking a drafter that pays would make the queue longer.
LOW_MEMORY = STEPS[:5]
SCARCE_MEMORY = STEPS
HEAT: tuple[Step, ...] = ("shorten", "park")
SLOWDOWN: tuple[Step, ...] = ("shorten", "park")
QUEUE: tuple[Step, ...] = ("shorten", "refuse")

SCARCE_SHARE = 0.5  # of the floor: then steps do not wait for each other, and requests are refused
CLEAR_RATIO = 1.25  # free memory over its floor at which the pressure is gone
CLEAR_C = 5.0  # degrees below the limit at which heat is gone
CLEAR_QUEUE = 0.5  # of the limit
SLOW_FOR_S = 3.0  # one slow round is no pressure


@dataclass(slots=True, frozen=True)
class Signal:
    """One pressure now. "hold": not enough to take a step, too much to lift one."""

    name: str
    steps: tuple[Step, ...]
    state: Literal["on", "hold", "off"]
    text: str
    is_urgent: bool = False


class Signals:
    """Tells the pressures of each moment; what is not told is no pressure.

    It remembers one thing: since when rounds are slow.
    """

    __slots__ = ("_limits", "_slow_since_s")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slow_since_s: float | None = None

    def at(
        self,
        reading: Reading,
        now_s: float,
        *,
        queue_len: int,
        n_active: int,
        slowdown: float | None,
    ) -> list[Signal]:
        """All signals of one look; the parameters are those of PressurePolicy.observe."""
        return [
            *self._memory(reading),
            *self._heat(reading),
            *self._slowdown(now_s, slowdown if n_active else None),
            *self._queue(queue_len, n_active),
        ]

    def _memory(self, reading: Reading) -> Iterator[Signal]:
        if reading.ram_free_bytes is not None:
            floor = self._floor(self._limits.min_free_ram_bytes, reading.ram_total_bytes)
            yield from self._of_memory("free memory", reading.ram_free_bytes, floor)
        for gpu in reading.gpus:
            if not gpu.is_shared:
                floor = self._floor(self._limits.min_free_vram_bytes, gpu.total_bytes)
                yield from self._of_memory(f"free memory of {gpu.name}", gpu.free_bytes, floor)

    def _floor(self, min_bytes: int, total_bytes: int | None) -> float:
        if total_bytes is None:
            return min_bytes
        floor = max(min_bytes, self._limits.min_free_share * total_bytes)
        return min(floor, MAX_FLOOR_SHARE * total_bytes)

    def _of_memory(self, name: str, free: int, floor: float) -> Iterator[Signal]:
        scarce = SCARCE_SHARE * floor
        yield _falling(f"{name} (scarce)", SCARCE_MEMORY, name, free, scarce, is_urgent=True)
        yield _falling(name, LOW_MEMORY, name, free, floor)
        # The drafter runs on its context and its weights, so loading starts with room for both.
        context_bytes = self._limits.drafter_context_bytes
        both_bytes = context_bytes + self._limits.drafter_weights_bytes
        rooms: tuple[tuple[Step, int], ...] = (
            ("release_context", context_bytes),
            ("release_weights", both_bytes),
        )
        for step, room in rooms:
            has_room = free >= CLEAR_RATIO * floor + room
            yield Signal(f"{name} for {step}", (step,), "off" if has_room else "hold", "")

    def _heat(self, reading: Reading) -> Iterator[Signal]:
        at, trip_c = reading.temperature_c, reading.trip_c
        limit_c = None if trip_c is None else trip_c - self._limits.trip_margin_c
        is_hot = at is not None and limit_c is not None and at >= limit_c
        if reading.is_throttled and not is_hot:
            where = "" if at is None else f" at {at:.1f} C"
            yield Signal("temperature", HEAT, "on", f"the device is throttled{where}")
        elif at is not None and limit_c is not None:
            if is_hot:
                text = f"temperature {at:.1f} C has reached {limit_c:.1f} C"
                yield Signal("temperature", HEAT, "on", f"{text} (trip point {trip_c:.1f} C)")
            else:
                clear_c = limit_c - CLEAR_C
                text = f"temperature {at:.1f} C is below {clear_c:.1f} C"
                yield Signal("temperature", HEAT, "hold" if at >= clear_c else "off", text)
        elif reading.is_throttled is not None:
            yield Signal("temperature", HEAT, "off", "the device is not throttled")

    def _slowdown(self, now_s: float, slowdown: float | None) -> Iterator[Signal]:
        most, clear = self._limits.max_slowdown, CLEAR_SLOWDOWN * self._limits.max_slowdown
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
            yield Signal("step time", SLOWDOWN, "on" if slow_s >= SLOW_FOR_S else "hold", text)
        else:
            state: Literal["hold", "off"] = "hold" if slowdown > clear else "off"
            yield Signal("step time", SLOWDOWN, state, f"{text}, below {clear:.2f}x")

    def _queue(self, queue_len: int, n_active: int) -> Iterator[Signal]:
        most = self._limits.max_queue * max(1, n_active)
        clear = CLEAR_QUEUE * most
        if queue_len > most:
            text = f"{queue_len} requests wait, more than {most} for {n_active} active"
            yield Signal("queue", QUEUE, "on", text)
        else:
            text = f"{queue_len} requests wait, at most {clear:.0f}"
            yield Signal("queue", QUEUE, "hold" if queue_len > clear else "off", text)


def _falling(
    name: str,
    steps: tuple[Step, ...],
    subject: str,
    free_bytes: int,
    floor_bytes: float,
    *,
    is_urgent: bool = False,
) -> Signal:
    """Free memory against its floor. Rounded down, as what is left must not look like more."""
    text = f"{subject} {free_bytes // MB} MB is"
    if free_bytes < floor_bytes:
        text = f"{text} below {floor_bytes / MB:.0f} MB"
        return Signal(name, steps, "on", text, is_urgent)
    clear_bytes = CLEAR_RATIO * floor_bytes
    state: Literal["hold", "off"] = "hold" if free_bytes < clear_bytes else "off"
    return Signal(name, steps, state, f"{text} above {clear_bytes / MB:.0f} MB", is_urgent)
