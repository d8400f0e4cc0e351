"""Joules from fake sysfs trees: RAPL counters that wrap, a Jetson's monitor, and none at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dspark_edge.bench.energy import PowerMeter, Rail, find_meter


def rapl(root: Path, name: str, microjoules: int, most: int = 1_000_000_000) -> Path:
    domain = root / "sys/class/powercap" / name
    domain.mkdir(parents=True)
    (domain / "energy_uj").write_text(f"{microjoules}\n")
    (domain / "max_energy_range_uj").write_text(f"{most}\n")
    return domain / "energy_uj"


def write(root: Path, path: str, text: str) -> Path:
    file = root / "sys/bus/i2c/drivers" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_packages_are_added_up_and_their_parts_are_not(tmp_path: Path) -> None:
    first = rapl(tmp_path, "intel-rapl:0", 5_000_000)
    second = rapl(tmp_path, "intel-rapl:1", 7_000_000)
    part = rapl(tmp_path, "intel-rapl:0:0", 0)
    meter = find_meter(tmp_path)
    assert meter is not None
    assert meter.joules() == 0.0
    first.write_text("8000000\n")
    second.write_text("8000000\n")
    part.write_text("2000000\n")
    assert meter.joules() == pytest.approx(4.0)
    assert "2 package" in meter.source


def test_a_counter_that_starts_again_goes_on_counting(tmp_path: Path) -> None:
    counter = rapl(tmp_path, "intel-rapl:0", 9_000_000, most=10_000_000)
    meter = find_meter(tmp_path)
    assert meter is not None
    counter.write_text("2000000\n")
    assert meter.joules() == pytest.approx(3.0)
    counter.write_text("garbled\n")  # tells nothing for a moment
    assert meter.joules() == pytest.approx(3.0)
    counter.write_text("2500000\n")
    assert meter.joules() == pytest.approx(3.5)


def test_a_machine_that_does_not_tell_has_no_meter(tmp_path: Path) -> None:
    assert find_meter(tmp_path) is None
    rapl(tmp_path, "intel-rapl:0", 1).unlink()  # as good as unreadable
    assert find_meter(tmp_path) is None


def test_the_whole_board_of_a_jetson_is_read(tmp_path: Path) -> None:
    folder = "ina3221/1-0040/hwmon/hwmon3"
    for number, (rail, volts, amperes) in enumerate(
        [("VDD_CPU_CV", 5000, 400), ("VDD_IN", 5000, 2000)], start=1
    ):
        write(tmp_path, f"{folder}/in{number}_label", f"{rail}\n")
        write(tmp_path, f"{folder}/in{number}_input", f"{volts}\n")
        write(tmp_path, f"{folder}/curr{number}_input", f"{amperes}\n")
    meter = find_meter(tmp_path)
    assert meter is not None
    meter.close()
    assert "VDD_IN" in meter.source
    start, before = time.perf_counter(), meter.joules()
    while time.perf_counter() == start:  # any time at all
        pass
    after, end = meter.joules(), time.perf_counter()
    assert 0.0 < after - before <= 10.0 * (end - start) + 1e-9  # 5 V times 2 A


def test_the_older_names_of_a_jetson_are_read(tmp_path: Path) -> None:
    write(tmp_path, "ina3221x/6-0040/iio:device0/rail_name_0", "POM_5V_IN\n")
    write(tmp_path, "ina3221x/6-0040/iio:device0/in_power0_input", "4200\n")
    meter = find_meter(tmp_path)
    assert isinstance(meter, PowerMeter)
    meter.close()
    assert "POM_5V_IN" in meter.source


def test_a_rail_multiplies_what_it_reads(tmp_path: Path) -> None:
    volts, amperes = write(tmp_path, "in1_input", "12000"), write(tmp_path, "curr1_input", "1500")
    rail = Rail("VDD_IN", [volts, amperes], 1e-6)
    assert rail.watts() == pytest.approx(18.0)
    amperes.unlink()
    assert rail.watts() is None
