"""Where Linux tells what a machine has left: /proc, cgroups and sysfs, a Jetson's own files too.

Owns their places and their formats; `top` is the folder in which proc, sys, etc and var are found.
A file that is missing or garbled gives None; nothing in here raises. Refuses to know what becomes
of a figure (device.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
CELSIUS = (-50.0, 150.0)  # beyond: a sensor that is off (Jetson says -256) or a trip not set
TRIPS = ("passive", "hot", "critical")  # an "active" trip only starts a fan
ALARM_ZONES = ("x86_pkg_temp",)  # their trips are alarms that programs set for themselves
CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # first input: the whole package
THROTTLES = (  # cooling devices that slow the chip down, unlike a fan
    "Processor",
    "intel_powerclamp",
    "cpufreq-",
    "devfreq-",
    "thermal-cpufreq-",
    "thermal-devfreq-",
    "cpu-throttle",
    "gpu-throttle",
)
JETSON_GPUS = (".gpu", ".ga10b", ".gv11b", ".gp10b", ".gm20b")  # as devfreq names them
MAX_FILE_BYTES = 1 << 16  # more than any file read here holds
FULL_LOAD = 1000  # a Jetson's GPU load is in tenths of a percent


# ---------------------------------------------------------------- memory


def ram(top: str) -> tuple[int | None, int | None]:
    """(free, total) in bytes under every cgroup limit above this process."""
    meminfo = _text(f"{top}/proc/meminfo")
    total, available = _field(meminfo, "MemTotal"), _field(meminfo, "MemAvailable")
    if total is None:
        return None, None
    total_bytes = total * 1024
    free_bytes = None if available is None else available * 1024
    for limit_bytes, used_bytes in _cgroup_limits(top):
        total_bytes = min(total_bytes, limit_bytes)
        if used_bytes is None:
            free_bytes = None
        elif free_bytes is not None:
            free_bytes = max(0, min(free_bytes, limit_bytes - used_bytes))
    return free_bytes, total_bytes


def _cgroup_limits(top: str) -> Iterator[tuple[int, int | None]]:
    """(limit, used or None) in bytes of each limited cgroup, from this process's up to the top."""
    for line in _text(f"{top}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            for folder in _upwards(f"{top}/sys/fs/cgroup", path):
                limits = [_number(_text(f"{folder}/memory.{n}")) for n in ("max", "high")]
                yield from _limit(folder, limits, "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(f"{top}/sys/fs/cgroup/memory", path):
                limits = [_number(_text(f"{folder}/memory.limit_in_bytes"))]
                yield from _limit(folder, limits, "memory.usage_in_bytes", "total_inactive_file")


def _upwards(hierarchy: str, path: str) -> Iterator[str]:
    """Folders from the cgroup up to the top; in a container those outside it do not exist."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for n in range(len(parts), -1, -1):
        yield "/".join((hierarchy, *parts[:n]))


def _limit(
    folder: str, limits: Iterable[int | None], usage_name: str, inactive_name: str
) -> Iterator[tuple[int, int | None]]:
    known = [limit for limit in limits if limit is not None and 0 <= limit < NO_LIMIT_BYTES]
    if not known:
        return
    usage = _number(_text(f"{folder}/{usage_name}"))
    # Cached file pages that nothing has used lately are given back before the limit bites.
    inactive = _field(_text(f"{folder}/memory.stat"), inactive_name) or 0
    yield min(known), None if usage is None else max(0, usage - inactive)


# ---------------------------------------------------------------- heat, power, load


def heat(top: str) -> tuple[float | None, float | None, bool | None]:
    """(temperature, its trip point, whether the chip is slowed down)."""
    sensors: list[tuple[float, float | None]] = []
    throttled: list[bool] = []
    for zone in _entries(f"{top}/sys/class/thermal", "thermal_zone"):
        temperature_c = _celsius(f"{zone}/temp")
        if temperature_c is not None:
            trips = _trips(zone)
            sensors.append((temperature_c, min((c for _, c in trips), default=None)))
            throttled += [temperature_c >= c for kind, c in trips if kind == "passive"]
    for chip in _entries(f"{top}/sys/class/hwmon"):
        if _text(f"{chip}/name") in CPU_CHIPS:
            temperature_c = _celsius(f"{chip}/temp1_input")
            if temperature_c is not None:
                sensors.append((temperature_c, _celsius(f"{chip}/temp1_crit")))
    for cooler in _entries(f"{top}/sys/class/thermal", "cooling_device"):
        if _text(f"{cooler}/type").startswith(THROTTLES):
            state = _number(_text(f"{cooler}/cur_state"))
            throttled += [] if state is None else [state > 0]
    return (*_most_critical(sensors), any(throttled) if throttled else None)


def _trips(zone: str) -> list[tuple[str, float]]:
    """(type, degrees) of a zone's trip points that slow the chip down or stop it."""
    if _text(f"{zone}/type") in ALARM_ZONES:
        return []
    trips = []
    for path in _entries(zone, "trip_point_"):
        kind = _text(path) if path.endswith("_type") else ""
        if kind in TRIPS:
            degrees = _celsius(path.removesuffix("type") + "temp")
            if degrees is not None and degrees > 0.0:  # 0: not set
                trips.append((kind, degrees))
    return trips


def _most_critical(
    sensors: Sequence[tuple[float, float | None]],
) -> tuple[float | None, float | None]:
    with_trip = [(trip - c, c, trip) for c, trip in sensors if trip is not None]
    if with_trip:
        return min(with_trip)[1:]
    return max((c for c, _ in sensors), default=None), None


def power(top: str) -> tuple[bool | None, float | None]:
    """(on battery, mean percent) of the batteries that feed the machine, not its mouse."""
    states, percents = [], []
    for supply in _entries(f"{top}/sys/class/power_supply"):
        if _text(f"{supply}/type") != "Battery" or _text(f"{supply}/scope") == "Device":
            continue
        states.append(_text(f"{supply}/status"))
        percent = _number(_text(f"{supply}/capacity"))
        if percent is not None and 0 <= percent <= 100:
            percents.append(percent)
    plugged = ("Charging", "Full", "Not charging")
    on_battery = True if "Discharging" in states else None
    if on_battery is None and any(state in plugged for state in states):
        on_battery = False
    return on_battery, sum(percents) / len(percents) if percents else None


def gpu_load(top: str) -> float | None:
    """Share of time that a Jetson's GPU is busy, 0..1."""
    for gpu in _entries(f"{top}/sys/class/devfreq"):
        if gpu.endswith(JETSON_GPUS):
            load = _number(_text(f"{gpu}/device/load"))
            if load is not None and 0 <= load <= FULL_LOAD:
                return load / FULL_LOAD
    return None


def power_mode(top: str) -> str | None:
    """The name of a Jetson's nvpmodel mode, or its number where it has none."""
    status = re.search(r"pmode:([0-9]{1,4})\b", _text(f"{top}/var/lib/nvpmodel/status"))
    conf = _text(f"{top}/etc/nvpmodel.conf")
    default = re.search(r"^< PM_CONFIG DEFAULT=([0-9]{1,4}) >", conf, re.MULTILINE)
    found = status or default  # until it is set once, the default holds
    if found is None:
        return None
    mode = int(found[1])
    name = re.search(rf"^< POWER_MODEL ID={mode} NAME=(\S+) >", conf, re.MULTILINE)
    return name[1] if name else str(mode)


def load_per_core(top: str) -> float | None:
    """1-minute load average over the cores that are on."""
    match = re.match(r"([0-9]{1,9}\.[0-9]+) ", _text(f"{top}/proc/loadavg"))
    n_cores = _n_cores(_text(f"{top}/sys/devices/system/cpu/online"))
    return float(match[1]) / n_cores if match and n_cores > 0 else None


def _n_cores(online: str) -> int:
    """Cores in a list such as 0-3,6; 0 where it is none."""
    if not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*", online):
        return 0
    spans = [span.partition("-") for span in online.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


# ---------------------------------------------------------------- files: plain strings and one
# system call each, for a laptop has a hundred of them


def _text(path: str) -> str:
    """The file's text without outer blanks; "" where it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return ""
    try:
        content = os.read(file, MAX_FILE_BYTES)
    except OSError:  # a sensor that is off
        return ""
    finally:
        os.close(file)
    return content.decode("utf-8", errors="surrogateescape").strip(" \t\r\n\0")


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def _celsius(path: str) -> float | None:
    """A temperature that sysfs gives in thousandths of a degree."""
    number = _number(_text(path))
    if number is None or not CELSIUS[0] < number / 1000 < CELSIUS[1]:
        return None
    return number / 1000


def _entries(folder: str, prefix: str = "") -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [f"{folder}/{name}" for name in sorted(names) if name.startswith(prefix)]


def _field(text: str, name: str) -> int | None:
    """The number behind a name at a line's start, as in /proc/meminfo and memory.stat."""
    match = re.search(rf"^{name}:?\s+([0-9]{{1,19}})\b", text, re.MULTILINE)
    return int(match[1]) if match else None
