"""How much more a draft must promise on battery, so that fewer tokens are verified in vain.

Owns the bar: it rises at once and falls when the machine has been better off for a while. Refuses
to know what is drafted.
"""

from __future__ import annotations

from .device import Reading
from .pressure import Action, Limits

CLEAR_PERCENT = 5.0  # battery percent above the limit


class BatteryBar:
    """The bar now. action: what is in force because of it; None on the mains."""

    __slots__ = ("_limits", "_lower_since_s", "action")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lower_since_s: float | None = None
        self.action: Action | None = None

    @property
    def height(self) -> float:
        """How many times plain decoding's tokens per second a draft must promise; 1: no bar."""
        return 1.0 if self.action is None else self.action.value

    def move(self, reading: Reading, now_s: float) -> list[Action]:
        """What the power source changes now: at most one action. now_s never goes back."""
        wanted, reason = self._wanted(reading)
        if wanted >= self.height:
            self._lower_since_s = None
        if wanted == self.height:
            return []
        if wanted < self.height:
            if self._lower_since_s is None:
                self._lower_since_s = now_s
            lower_s = now_s - self._lower_since_s
            if lower_s < self._limits.rearm_s:
                return []
            reason = f"{reason}, for {lower_s:.0f} s"
        self._lower_since_s = None
        action = Action("raise_bar", wanted > 1.0, reason, wanted)
        self.action = action if action.is_on else None
        return [action]

    def _wanted(self, reading: Reading) -> tuple[float, str]:
        if not reading.on_battery:
            return 1.0, "not on battery"
        if reading.battery_percent is None:
            return self._limits.battery_bar, "on battery"
        limit = self._limits.low_battery_percent
        if self.height >= self._limits.low_battery_bar:
            limit += CLEAR_PERCENT
        text = f"on battery at {reading.battery_percent:.0f} %"
        if reading.battery_percent < limit:
            return self._limits.low_battery_bar, f"{text}, below {limit:.0f} %"
        return self._limits.battery_bar, text
