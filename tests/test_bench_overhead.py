"""bench overhead on a tiny pair: that its figures are there, and bad arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_edge.bench.__main__ import main


def test_speed_own_time_and_memory_are_told(
    tiny_llama: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        f"overhead --target {tiny_llama} --drafter {tiny_drafter} --pairs 2 --tokens 32 "
        "--threads 1".split()
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    plain = report["plain_over_low_level"]
    assert 0 < plain["low"] <= plain["median"] <= plain["high"]
    assert report["own_ms_per_round"].keys() == {"temperature 0", "temperature 1"}
    assert all(value > 0 for value in report["own_ms_per_round"].values())
    memory = report["memory"]
    rest = memory["engine_bytes"] - memory["low_level_bytes"] - memory["drafter_bytes"]
    assert memory["rest_bytes"] == rest
    assert memory["drafter_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--pairs 0", "--pairs is 0"),
        ("--tokens 0", "--tokens is 0; give 32 to 1024"),
        ("--tokens 5000", "--tokens is 5000"),
        ("--threads 9999", "--threads is 9999"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["overhead", *arguments.split()]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
