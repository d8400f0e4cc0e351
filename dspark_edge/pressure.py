"""What can be given up while the machine is short of memory, coolness or time, and from when on.

Owns the words: the steps and their order, the limits, an action and its text. Nothing among the
steps ends a running conversation. Refuses to know what decides on them (pressure_policy.py) and who
carries them out (governor.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

MB = 10**6
MAX_FLOOR_SHARE = 1 / 8  # a small container's floor must not be most of it
CLEAR_SLOWDOWN = 0.8  # of the limit: then rounds count as in time again

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
