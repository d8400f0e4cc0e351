"""Joules that the machine has used, where it tells: RAPL packages, or a Jetson's power monitor.

Reads sysfs below a root that tests can fake. Refuses to know what is measured meanwhile.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

RAPL = "sys/class/powercap"
JETSON = "sys/bus/i2c/drivers"
TOTAL_RAILS = ("VDD_IN", "POM_5V_IN", "SYS5V")  # what the whole board takes, by Jetson generation
SAMPLE_EVERY_S = 0.1


class EnergyMeter(Protocol):
    """A counter of joules since some moment."""

    source: str

    def joules(self) -> float: ...
    def close(self) -> None: ...


def find_meter(root: Path = Path("/")) -> EnergyMeter | None:
    """The meter of this machine; None when it has none, or none that this user may read."""
    domains = [Domain(path) for path in sorted((root / RAPL).glob("intel-rapl:[0-9]*"))]
    # Domains with a second colon (cores, memory) are parts of their package.
    packages = [d for d in domains if d.path.name.count(":") == 1 and d.is_readable]
    if packages:
        return RaplMeter(packages)
    rail = _jetson_rail(root)
    return None if rail is None else PowerMeter(rail)


# ---------------------------------------------------------------- RAPL


class Domain:
    """One RAPL counter, in microjoules, which starts again from 0 beyond its range."""

    __slots__ = ("_before", "_sum", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: int | None = None
        self._sum = 0

    @property
    def is_readable(self) -> bool:
        """Whether its files can be read; most systems keep energy_uj for root."""
        return None not in (
            _read(self.path / "energy_uj"),
            _read(self.path / "max_energy_range_uj"),
        )

    def joules(self) -> float:
        """Since the first call."""
        now = _read(self.path / "energy_uj")
        if now is not None:
            if self._before is not None:
                gained = now - self._before
                if gained < 0:
                    gained += _read(self.path / "max_energy_range_uj") or 0
                self._sum += max(gained, 0)
            self._before = now
        return self._sum * 1e-6


class RaplMeter:
    """The processor packages together."""

    def __init__(self, packages: list[Domain]) -> None:
        self.source = f"RAPL, {len(packages)} package(s)"
        self._packages = packages
        self.joules()

    def joules(self) -> float:
        """Joules since it was made."""
        return sum(package.joules() for package in self._packages)

    def close(self) -> None:
        """Nothing to end."""


# ---------------------------------------------------------------- Jetson


class Rail:
    """One input of an INA power monitor, in watts."""

    __slots__ = ("_factors", "_scale", "name")

    def __init__(self, name: str, factors: list[Path], scale: float) -> None:
        self.name = name
        self._factors = factors
        self._scale = scale

    def watts(self) -> float | None:
        """None while it cannot be read."""
        product = self._scale
        for path in self._factors:
            value = _read(path)
            if value is None:
                return None
            product *= value
        return product


def _jetson_rail(root: Path) -> Rail | None:
    """The board's total input: hwmon names (JetPack 5 on), or the older iio ones."""
    base = root / JETSON
    for label in sorted(base.glob("ina3221/*/hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        factors = [label.with_name(f"in{number}_input"), label.with_name(f"curr{number}_input")]
        rail = Rail(_text(label), factors, 1e-6)  # mV times mA
        if rail.name in TOTAL_RAILS and rail.watts() is not None:
            return rail
    for label in sorted(base.glob("ina3221x/*/iio:device*/rail_name_*")):
        number = label.name.removeprefix("rail_name_")
        rail = Rail(_text(label), [label.with_name(f"in_power{number}_input")], 1e-3)  # mW
        if rail.name in TOTAL_RAILS and rail.watts() is not None:
            return rail
    return None


class PowerMeter:
    """Integrates a rail's power, sampled by a thread of its own."""

    def __init__(self, rail: Rail, every_s: float = SAMPLE_EVERY_S) -> None:
        self.source = f"INA3221, {rail.name}"
        self._rail = rail
        self._joules = 0.0
        self._watts = rail.watts() or 0.0
        self._at_s = time.perf_counter()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(every_s,), daemon=True)
        self._thread.start()

    def joules(self) -> float:
        """Joules since it was made."""
        watts = self._rail.watts()
        with self._lock:
            now_s = time.perf_counter()
            latest = self._watts if watts is None else watts
            self._joules += (now_s - self._at_s) * (self._watts + latest) / 2
            self._watts, self._at_s = latest, now_s
            return self._joules

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self._thread.join()

    def _sample(self, every_s: float) -> None:
        while not self._is_over.wait(every_s):
            self.joules()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read(path: Path) -> int | None:
    """A whole number; None when the file is missing, garbled or not for this user."""
    text = _text(path)
    return int(text) if text.isascii() and text.isdecimal() else None
