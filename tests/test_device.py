"""Readings from fake trees of machines that we don't have, and one real fall of free memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dspark_edge.device import Gpu, Reading, Readings, read

GB = 10**9
KIB = 1024
MIB = 1 << 20

MEMINFO = """MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:    6000000 kB
Buffers:          200000 kB
"""
NO_V1_LIMIT = "9223372036854771712"

LAPTOP = {
    "proc/meminfo": MEMINFO,
    "proc/loadavg": "2.00 1.50 1.00 3/900 12345\n",
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
    "sys/devices/system/cpu/online": "0-7\n",
    "sys/fs/cgroup/user.slice/memory.max": "max\n",
    "sys/fs/cgroup/user.slice/user-1000.slice/memory.max": "max\n",
    "sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope/memory.max": "max\n",
    "sys/class/thermal/thermal_zone0/type": "acpitz\n",
    "sys/class/thermal/thermal_zone0/temp": "27800\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "critical\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "119000\n",
    "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
    "sys/class/thermal/thermal_zone1/temp": "84000\n",
    "sys/class/thermal/thermal_zone1/trip_point_0_type": "passive\n",
    "sys/class/thermal/thermal_zone1/trip_point_0_temp": "55000\n",
    "sys/class/thermal/cooling_device0/type": "Processor\n",
    "sys/class/thermal/cooling_device0/cur_state": "0\n",
    "sys/class/thermal/cooling_device1/type": "Fan\n",
    "sys/class/thermal/cooling_device1/cur_state": "3\n",
    "sys/class/hwmon/hwmon3/name": "coretemp\n",
    "sys/class/hwmon/hwmon3/temp1_input": "84000\n",
    "sys/class/hwmon/hwmon3/temp1_crit": "100000\n",
    "sys/class/hwmon/hwmon4/name": "nvme\n",
    "sys/class/hwmon/hwmon4/temp1_input": "89000\n",
    "sys/class/hwmon/hwmon4/temp1_crit": "90000\n",
    "sys/class/power_supply/AC/type": "Mains\n",
    "sys/class/power_supply/AC/online": "0\n",
    "sys/class/power_supply/BAT0/type": "Battery\n",
    "sys/class/power_supply/BAT0/status": "Discharging\n",
    "sys/class/power_supply/BAT0/capacity": "63\n",
    "sys/class/power_supply/hid-mouse/type": "Battery\n",
    "sys/class/power_supply/hid-mouse/scope": "Device\n",
    "sys/class/power_supply/hid-mouse/status": "Discharging\n",
    "sys/class/power_supply/hid-mouse/capacity": "9\n",
}

JETSON = {
    "proc/meminfo": "MemTotal: 7800000 kB\nMemFree: 300000 kB\nMemAvailable: 2000000 kB\n",
    "proc/loadavg": "3.00 1.00 0.50 2/400 999\n",
    "proc/self/cgroup": "0::/\n",
    "sys/devices/system/cpu/online": "0-3,5,6\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "61500\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "critical\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "104500\n",
    "sys/class/thermal/thermal_zone0/trip_point_1_type": "passive\n",
    "sys/class/thermal/thermal_zone0/trip_point_1_temp": "99000\n",
    "sys/class/thermal/thermal_zone0/trip_point_2_type": "active\n",
    "sys/class/thermal/thermal_zone0/trip_point_2_temp": "51000\n",
    "sys/class/thermal/thermal_zone1/type": "cv0-thermal\n",
    "sys/class/thermal/thermal_zone1/temp": "-256000\n",
    "sys/class/thermal/thermal_zone2/type": "tj-thermal\n",
    "sys/class/thermal/thermal_zone2/temp": "63000\n",
    "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
    "sys/class/thermal/cooling_device0/cur_state": "2\n",
    "sys/class/thermal/cooling_device1/type": "devfreq-17000000.gpu\n",
    "sys/class/thermal/cooling_device1/cur_state": "1\n",
    "sys/class/devfreq/15340000.vic/device/load": "5\n",
    "sys/class/devfreq/17000000.gpu/device/load": "842\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
    "etc/nvpmodel.conf": (
        "< PARAM TYPE=FILE NAME=CPU_ONLINE >\n"
        "< POWER_MODEL ID=0 NAME=15W >\nCPU_ONLINE CORE_0 1\n"
        "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n"
        "< PM_CONFIG DEFAULT=0 >\n"
    ),
}


@dataclass(slots=True, frozen=True)
class Device:
    name: str
    kind: str
    free_bytes: int
    total_bytes: int


def planted(root: Path, *trees: Mapping[str, str | bytes]) -> Path:
    for tree in trees:
        for name, content in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def ram(root: Path) -> tuple[int | None, int | None]:
    reading = read(root)
    return reading.ram_free_bytes, reading.ram_total_bytes


# ---------------------------------------------------------------- whole machines


def test_a_laptop_on_battery_is_read_whole(tmp_path: Path) -> None:
    gpu = Device("CUDA0", "gpu", 3 * GB, 8 * GB)
    assert read(planted(tmp_path, LAPTOP), [gpu]) == Reading(
        ram_free_bytes=6_000_000 * KIB,
        ram_total_bytes=16_000_000 * KIB,
        gpus=(Gpu("CUDA0", 3 * GB, 8 * GB, False),),
        temperature_c=84.0,
        trip_c=100.0,
        is_throttled=False,
        on_battery=True,
        battery_percent=63.0,
        load_per_core=0.25,
    )


def test_a_jetson_orin_is_read_whole(tmp_path: Path) -> None:
    gpu = Device("CUDA0", "igpu", 2_000_000 * KIB, 7_800_000 * KIB)
    assert read(planted(tmp_path, JETSON), lambda: [gpu]) == Reading(
        ram_free_bytes=2_000_000 * KIB,
        ram_total_bytes=7_800_000 * KIB,
        gpus=(Gpu("CUDA0", 2_000_000 * KIB, 7_800_000 * KIB, True),),
        temperature_c=61.5,
        trip_c=99.0,
        is_throttled=True,
        gpu_load=0.842,
        power_mode="MAXN_SUPER",
        load_per_core=0.5,
    )


def test_an_apple_machine_is_read_by_psutil(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=5 * GB, total=16 * GB)
    battery = SimpleNamespace(percent=81, power_plugged=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (4.0, 2.0, 1.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    metal = Device("MTL0", "gpu", 10 * GB, 12 * GB)
    assert read(tmp_path, [metal, Device("BLAS", "accel", 0, 0)]) == Reading(
        ram_free_bytes=5 * GB,
        ram_total_bytes=16 * GB,
        gpus=(Gpu("MTL0", 10 * GB, 12 * GB, True),),
        on_battery=True,
        battery_percent=81.0,
        load_per_core=0.5,
    )


def test_a_machine_of_which_psutil_knows_nothing_gives_an_empty_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NotImplementedError("not on this system")

    for name in ("virtual_memory", "sensors_battery", "getloadavg"):
        monkeypatch.setattr(psutil, name, refuse)
    assert read(tmp_path) == Reading()


# ---------------------------------------------------------------- memory limits


def test_a_cgroup_v2_limit_of_an_outer_slice_holds_inside_it(tmp_path: Path) -> None:
    slice_at = "sys/fs/cgroup/machine.slice"
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/machine.slice/app.service/inner\n",
        f"{slice_at}/memory.max": f"{512 * MIB}\n",
        f"{slice_at}/memory.current": f"{400 * MIB}\n",
        f"{slice_at}/memory.stat": f"anon {200 * MIB}\ninactive_file {100 * MIB}\n",
        f"{slice_at}/app.service/memory.max": "max\n",
        f"{slice_at}/app.service/memory.current": f"{390 * MIB}\n",
        f"{slice_at}/app.service/inner/memory.max": f"{2048 * MIB}\n",
        f"{slice_at}/app.service/inner/memory.current": f"{380 * MIB}\n",
    }
    assert ram(planted(tmp_path, tree)) == (212 * MIB, 512 * MIB)


def test_a_container_that_sees_its_own_cgroup_as_the_top_has_its_limit(tmp_path: Path) -> None:
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/../elsewhere\n",
        "sys/fs/elsewhere/memory.max": f"{MIB}\n",
        "sys/fs/cgroup/memory.max": f"{512 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{500 * MIB}\n",
    }
    assert ram(planted(tmp_path, tree)) == (12 * MIB, 512 * MIB)


def test_a_cgroup_that_is_throttled_before_its_limit_ends_there(tmp_path: Path) -> None:
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/app\n",
        "sys/fs/cgroup/app/memory.high": f"{400 * MIB}\n",
        "sys/fs/cgroup/app/memory.max": f"{512 * MIB}\n",
        "sys/fs/cgroup/app/memory.current": f"{450 * MIB}\n",
    }
    assert ram(planted(tmp_path, tree)) == (0, 400 * MIB)


def test_a_cgroup_v1_limit_of_a_parent_holds(tmp_path: Path) -> None:
    parent = "sys/fs/cgroup/memory/docker"
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_V1_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9000 * MIB}",
        f"{parent}/memory.limit_in_bytes": f"{1024 * MIB}\n",
        f"{parent}/memory.usage_in_bytes": f"{700 * MIB}\n",
        f"{parent}/memory.stat": f"inactive_file 1\ntotal_inactive_file {76 * MIB}\n",
        f"{parent}/ab/memory.limit_in_bytes": NO_V1_LIMIT,
        f"{parent}/ab/memory.usage_in_bytes": f"{600 * MIB}",
    }
    assert ram(planted(tmp_path, tree)) == (400 * MIB, 1024 * MIB)


def test_a_limit_above_what_is_free_changes_nothing(tmp_path: Path) -> None:
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/app\n",
        "sys/fs/cgroup/app/memory.max": f"{64_000 * MIB}\n",
        "sys/fs/cgroup/app/memory.current": f"{MIB}\n",
    }
    assert ram(planted(tmp_path, tree)) == (6_000_000 * KIB, 16_000_000 * KIB)


def test_free_memory_under_a_limit_with_unknown_use_is_unknown(tmp_path: Path) -> None:
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/app\n",
        "sys/fs/cgroup/app/memory.max": f"{512 * MIB}\n",
        "sys/fs/cgroup/app/memory.current": "many\n",
    }
    assert ram(planted(tmp_path, tree)) == (None, 512 * MIB)


# ---------------------------------------------------------------- single fields


def test_cpus_and_devices_whose_query_failed_are_no_gpus(tmp_path: Path) -> None:
    devices = [Device("CPU", "cpu", GB, GB), Device("CUDA0", "gpu", 0, 0)]
    assert read(planted(tmp_path, LAPTOP), devices).gpus == ()


def test_a_driver_that_fails_leaves_the_rest_of_the_reading(tmp_path: Path) -> None:
    def fail() -> Sequence[Device]:
        raise RuntimeError("CUDA error: device lost")

    reading = read(planted(tmp_path, LAPTOP), fail)
    assert (reading.gpus, reading.battery_percent) == ((), 63.0)


def test_reaching_a_passive_trip_point_is_throttling(tmp_path: Path) -> None:
    zone = "sys/class/thermal/thermal_zone0"
    reading = read(planted(tmp_path, JETSON, {f"{zone}/temp": "99500"}))
    assert (reading.temperature_c, reading.trip_c, reading.is_throttled) == (99.5, 99.0, True)


def test_without_a_trip_point_the_hottest_sensor_counts(tmp_path: Path) -> None:
    tree = {
        "proc/meminfo": MEMINFO,
        "sys/class/thermal/thermal_zone0/temp": "41000",
        "sys/class/thermal/thermal_zone1/temp": "47000",
    }
    reading = read(planted(tmp_path, tree))
    assert (reading.temperature_c, reading.trip_c, reading.is_throttled) == (47.0, None, None)


@pytest.mark.parametrize(
    ("status", "on_battery"),
    [("Charging", False), ("Full", False), ("Not charging", False), ("Unknown", None)],
)
def test_a_battery_that_does_not_discharge_is_not_in_use(
    tmp_path: Path, status: str, on_battery: bool | None
) -> None:
    tree = {"sys/class/power_supply/BAT0/status": status}
    assert read(planted(tmp_path, LAPTOP, tree)).on_battery is on_battery


def test_of_two_batteries_one_in_use_is_enough_and_the_percent_is_their_mean(
    tmp_path: Path,
) -> None:
    second = "sys/class/power_supply/BAT1"
    tree = {f"{second}/type": "Battery", f"{second}/status": "Full", f"{second}/capacity": "100"}
    reading = read(planted(tmp_path, LAPTOP, tree))
    assert (reading.on_battery, reading.battery_percent) == (True, 81.5)


def test_a_power_mode_without_a_name_is_its_number(tmp_path: Path) -> None:
    tree = {"var/lib/nvpmodel/status": "pmode:0007"}
    assert read(planted(tmp_path, JETSON, tree)).power_mode == "7"


def test_a_power_mode_that_was_never_set_is_the_default(tmp_path: Path) -> None:
    root = planted(tmp_path, JETSON)
    (root / "var/lib/nvpmodel/status").unlink()
    assert read(root).power_mode == "15W"


# ---------------------------------------------------------------- missing and garbled


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\xfe\x00junk", b"-999999999", b"9" * 5000, b"NaN\n", b"::"]
)
@pytest.mark.parametrize("machine", [LAPTOP, JETSON])
def test_garbled_files_leave_fields_unknown(
    tmp_path: Path, machine: dict[str, str], garbage: bytes
) -> None:
    root = planted(tmp_path, {name: garbage for name in machine})
    assert read(root) == Reading()


@pytest.mark.parametrize("machine", [LAPTOP, JETSON])
def test_any_single_file_may_be_missing_or_a_folder(
    tmp_path: Path, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_edge.device._read_by_psutil", lambda gpus: Reading())
    whole = read(planted(tmp_path, machine))
    for name, content in machine.items():
        (tmp_path / name).unlink()
        read(tmp_path)
        (tmp_path / name).mkdir()
        read(tmp_path)
        (tmp_path / name).rmdir()
        planted(tmp_path, {name: content})
    assert read(tmp_path) == whole


@pytest.mark.parametrize("online", ["", "3-0", "a-b", "0-", ",", "0-3;4"])
def test_a_garbled_list_of_cores_leaves_the_load_unknown(tmp_path: Path, online: str) -> None:
    tree = {"sys/devices/system/cpu/online": online}
    assert read(planted(tmp_path, LAPTOP, tree)).load_per_core is None


# ---------------------------------------------------------------- this machine, and the cache


def test_this_machine_tells_its_memory() -> None:
    reading = read()
    assert reading.ram_free_bytes is not None
    assert reading.ram_total_bytes is not None
    assert 0 < reading.ram_free_bytes < reading.ram_total_bytes <= psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has cgroups")
def test_memory_that_a_child_takes_is_missing_in_the_reading(tmp_path: Path) -> None:
    # The cgroup's real use under a limit of ours. What all of Linux has free would not do: pages it
    # keeps for each CPU, up to an eighth of memory, are handed out first and never counted as free.
    root, n_bytes = limited_here(tmp_path, 512 * MIB), 64 * MIB
    code = f"import sys; held = b'x' * {n_bytes}; print(flush=True); sys.stdin.read()"
    before = read(root).ram_free_bytes
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        during = read(root).ram_free_bytes
        child.communicate()
    assert before is not None
    assert during is not None
    assert n_bytes * 3 // 4 < before - during < n_bytes * 5 // 4


def limited_here(root: Path, room_bytes: int) -> Path:
    """A tree with this process's real cgroup, given a limit that leaves room_bytes; or skips."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        cgroups = Path("/sys/fs/cgroup/memory" if is_v1 else "/sys/fs/cgroup")
        usage = "memory.usage_in_bytes" if is_v1 else "memory.current"
        real, ours = cgroups / path.lstrip("/"), root / cgroups.relative_to("/") / "ours"
        if (is_v1 or controllers == "") and (real / usage).is_file():
            limit = int((real / usage).read_text()) + room_bytes
            name = "memory.limit_in_bytes" if is_v1 else "memory.max"
            tree = {"proc/self/cgroup": f"{number}:{controllers}:/ours", "proc/meminfo": MEMINFO}
            planted(root, tree)
            planted(ours, {name: str(limit)})
            for file in (usage, "memory.stat"):
                (ours / file).symlink_to(real / file)
            return root
    pytest.skip("the cgroup of this process does not count its memory")


def test_a_reading_is_taken_again_once_it_is_old(tmp_path: Path) -> None:
    root, now_s = planted(tmp_path, LAPTOP), [100.0]
    readings = Readings(partial(read, root), interval_s=1.0, clock=lambda: now_s[0])
    percents = []
    for capacity, at_s in [("63", 100.0), ("62", 100.9), ("61", 101.0), ("60", 101.5)]:
        planted(root, {"sys/class/power_supply/BAT0/capacity": capacity})
        now_s[0] = at_s
        percents.append(readings.latest().battery_percent)
    assert percents == [63.0, 63.0, 61.0, 61.0]


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interval_s is -1\.0; it must be 0 or more"):
        Readings(interval_s=-1.0)
