"""What the machine has left: RAM, VRAM, heat, power and load, as one Reading.

Owns what a reading is, how often one is taken, and psutil's part where there is no /proc. What is
not told leaves its field None; reading never raises. Refuses to know the files of Linux
(device_linux.py), what is done about a reading (pressure.py), and the extension: VRAM is handed in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from . import device_linux

T = TypeVar("T")


class GpuDevice(Protocol):
    """What llama.cpp says about a device (_core.DeviceMemory)."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


GpuDevices = Sequence[GpuDevice] | Callable[[], Sequence[GpuDevice]]


@dataclass(slots=True, frozen=True)
class Gpu:
    """One GPU. is_shared: its memory is the RAM of the reading, so it must not be added to it."""

    name: str
    free_bytes: int
    total_bytes: int
    is_shared: bool


@dataclass(slots=True, frozen=True)
class Reading:
    """One look at the machine; None is what it does not tell.

    ram_free_bytes, ram_total_bytes: what this process may really use, so a container's limit is the
    total. temperature_c: of the sensor nearest to its trip point trip_c, where throttling or worse
    begins; of the hottest sensor where none has one. gpu_load: share of time busy, 0..1 (Jetson).
    power_mode: nvpmodel's name, or its number (Jetson). load_per_core: 1-minute load average over
    cores, 1 meaning all busy.
    """

    ram_free_bytes: int | None = None
    ram_total_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    temperature_c: float | None = None
    trip_c: float | None = None
    is_throttled: bool | None = None
    on_battery: bool | None = None
    battery_percent: float | None = None
    gpu_load: float | None = None
    power_mode: str | None = None
    load_per_core: float | None = None


def read(root: Path = Path("/"), gpu_devices: GpuDevices = ()) -> Reading:
    """Look at the machine once. Never raises.

    root: where proc, sys, etc and var are found. gpu_devices: _core.device_memory or its result;
    CPUs among them are left out, and one that fails counts as no GPU told. Takes 0.2 ms on a tree
    of a laptop's 34 files and 1.2 ms on one of 206 (measured on a 2-core virtual machine, medians);
    what real sensors and gpu_devices take comes on top.
    """
    gpus = _gpus(gpu_devices)
    top = os.fspath(root).rstrip("/")
    if not os.path.exists(f"{top}/proc/meminfo"):
        return _read_by_psutil(gpus)
    free_bytes, total_bytes = device_linux.ram(top)
    temperature_c, trip_c, is_throttled = device_linux.heat(top)
    on_battery, battery_percent = device_linux.power(top)
    return Reading(
        ram_free_bytes=free_bytes,
        ram_total_bytes=total_bytes,
        gpus=gpus,
        temperature_c=temperature_c,
        trip_c=trip_c,
        is_throttled=is_throttled,
        on_battery=on_battery,
        battery_percent=battery_percent,
        gpu_load=device_linux.gpu_load(top),
        power_mode=device_linux.power_mode(top),
        load_per_core=device_linux.load_per_core(top),
    )


class Readings:
    """Readings at a pace: a new one is taken once the last is interval_s old."""

    __slots__ = ("_clock", "_due_s", "_interval_s", "_latest", "_source")

    def __init__(
        self,
        source: Callable[[], Reading] = read,
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds, never going back. Raises ValueError for a negative interval."""
        if not interval_s >= 0.0:
            raise ValueError(f"interval_s is {interval_s}; it must be 0 or more")
        self._source = source
        self._interval_s = interval_s
        self._clock = clock
        self._latest = Reading()
        self._due_s = clock()  # the first is taken at once

    def next(self) -> Reading | None:
        """A new reading when one is due; otherwise None, in under a microsecond."""
        now_s = self._clock()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._interval_s
        self._latest = self._source()
        return self._latest

    def latest(self) -> Reading:
        """A reading at most interval_s old."""
        self.next()
        return self._latest


def _gpus(devices: GpuDevices) -> tuple[Gpu, ...]:
    try:
        found = devices() if callable(devices) else devices
        return tuple(
            Gpu(
                name=d.name,
                free_bytes=d.free_bytes,
                total_bytes=d.total_bytes,
                # ggml's Metal calls itself a plain GPU, but an Apple chip has one memory.
                is_shared=d.kind == "igpu" or d.name.startswith("MTL"),
            )
            for d in found
            if d.kind in ("gpu", "igpu") and d.total_bytes > 0  # 0: ggml's query failed
        )
    except Exception:  # whatever a driver's failure raises, a reading goes on without it
        return ()


# ---------------------------------------------------------------- systems without /proc


def _read_by_psutil(gpus: tuple[Gpu, ...]) -> Reading:
    """macOS and Windows, where psutil has no temperatures."""
    memory = _told(lambda: psutil.virtual_memory())
    battery = _told(lambda: psutil.sensors_battery())
    plugged = battery.power_plugged if battery is not None else None
    return Reading(
        ram_free_bytes=memory.available if memory is not None else None,
        ram_total_bytes=memory.total if memory is not None else None,
        gpus=gpus,
        on_battery=None if plugged is None else not plugged,
        battery_percent=_told(lambda: float(battery.percent)) if battery is not None else None,
        load_per_core=_told(lambda: psutil.getloadavg()[0] / (psutil.cpu_count() or 1)),
    )


def _told(ask: Callable[[], T]) -> T | None:
    """What psutil answers; None where this system does not have it."""
    try:
        return ask()
    except Exception:  # psutil lacks the function, or the system refuses in its own way
        return None
