"""The bench's doubts: what others took of the processors, and how steady plain was."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from dspark_edge.bench.busy import busy_reason
from dspark_edge.others import CpuSeconds, Others, read_cpu

N_CPU = os.cpu_count() or 1
BURNT_S = 0.2
TICK_S = 0.02  # the system counts in ticks
BURN = f"import time\nwhile time.process_time() < {BURNT_S}: pass"


def test_others_took_what_is_neither_ours_nor_idle() -> None:
    moments = iter(
        [
            CpuSeconds(at=10.0, total=500.0, ours=40.0),
            CpuSeconds(at=20.0, total=500.0 + 9.0 * N_CPU, ours=40.0 + 6.0 * N_CPU),
        ]
    )
    assert Others(lambda: next(moments)).share() == pytest.approx(0.3)


def test_counters_that_run_behind_give_no_negative_share() -> None:
    moments = iter([CpuSeconds(0.0, 5.0, 5.0), CpuSeconds(1.0, 5.0, 6.0)])
    assert Others(lambda: next(moments)).share() == 0.0


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("error", [PermissionError("/proc/stat"), psutil.AccessDenied(1)])
def test_a_system_that_does_not_tell_is_no_error(error: Exception, at: int) -> None:
    """A load would fail of it, in a container without /proc."""
    n_read = iter(range(2))

    def read() -> CpuSeconds:
        if next(n_read) == at:
            raise error
        return CpuSeconds(at=100.0 * at, total=900.0, ours=0.0)

    assert Others(read).share() == 0.0


def test_our_time_is_ours_and_not_that_of_others() -> None:
    """Else every run would call the machine busy."""
    before, end = read_cpu(), time.process_time() + BURNT_S
    while time.process_time() < end:
        pass
    after = read_cpu()
    assert after.ours - before.ours >= BURNT_S - TICK_S
    assert after.total - before.total >= 0.5 * BURNT_S
    assert after.at > before.at


def test_children_are_ours_while_they_run_and_when_they_have_ended() -> None:
    """Servers that are compared are children."""
    before = read_cpu().ours
    child = subprocess.Popen([sys.executable, "-c", BURN])
    child.wait()
    assert read_cpu().ours - before >= BURNT_S - TICK_S

    before = read_cpu().ours
    code = f"{BURN}\nprint('burnt', flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert read_cpu().ours - before >= BURNT_S - TICK_S


@pytest.mark.parametrize(
    ("share", "speeds", "says"),
    [
        (0.02, [[100.0, 101.0, 99.0]], []),
        (0.02, [], []),
        (0.02, [[0.0]], []),
        (None, [[100.0]], []),
        (0.08, [[100.0, 101.0, 99.0]], ["other programs took 8%"]),
        # Half of the repeats are between the quartiles, 90 and 110.
        (0.0, [[100.0], [80.0, 90.0, 100.0, 110.0, 120.0]], ["speeds lie 20% apart"]),
        (0.5, [[50.0, 100.0]], ["took 50%", "apart"]),
        # One slow repeat of many says nothing against the median.
        (0.0, [[100.0, 100.0, 20.0, 100.0, 100.0]], []),
    ],
)
def test_a_machine_is_busy_by_others_or_by_unsteady_speed(
    share: float | None, speeds: list[list[float]], says: list[str]
) -> None:
    reason = busy_reason(share, speeds)
    assert (reason is None) is (not says)
    assert all(part in (reason or "") for part in says)
