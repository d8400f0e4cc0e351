"""Where reports of the bench go, and that a measurement is not lost at the end of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_modes import ScriptedModes

from dspark_edge.bench import run, run_memory
from dspark_edge.bench.__main__ import main
from dspark_edge.bench.block_recorder import read_prompts
from dspark_edge.bench.output import check_place

RUN = ["run", "--modes", "plain", "--repeats", "1", "--max-tokens", "4"]
RUN += ["--max-prompts", "1", "--ctx", "512"]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedModes:
    modes = ScriptedModes()
    monkeypatch.setattr(run, "open_mode", modes.open)
    return modes


def fails(*_: Any) -> None:
    raise OSError("the disk is full")


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("what", ["plot", "json"])
def test_a_file_that_fails_at_the_end_leaves_the_report_on_stdout(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An hour of measuring would be gone."""
    monkeypatch.setattr(run, "plot", fails)
    monkeypatch.setattr("dspark_edge.bench.output.write_atomically", lambda *_: False)
    file = tmp_path / f"report.{'svg' if what == 'plot' else what}"
    assert main([*RUN, "--no-memory", f"--{what}", str(file)]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["modes"][0]["mode"] == "plain"
    assert f"error: --{what} {file} cannot be written" in shown.err


def test_a_place_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    with pytest.raises(ValueError, match=r"^--json is .*, which is a folder; give a file$"):
        check_place("--json", tmp_path)
    with pytest.raises(ValueError, match=r"nothing can be written into .*a file$"):
        check_place("--json", file / "below" / "x.json")
    check_place("--json", tmp_path / "made" / "later" / "x.json")
    check_place("--json", None)


@pytest.mark.usefixtures("scripted")
def test_ctrl_c_ends_a_measurement_in_one_line_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_group", interrupted)
    assert main([*RUN, "--no-memory"]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "interrupted; there is no report\n"


@pytest.mark.usefixtures("scripted")
def test_a_memory_process_that_dies_costs_its_figure_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed where memory is short, and says nothing then."""
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(run_memory.subprocess, "run", lambda *_, **__: killed)
    assert main(RUN) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["modes"][0]["peak_rss_bytes"] is None
    assert "no peak memory of plain: its process ended with -9: it said nothing" in shown.err


@pytest.mark.usefixtures("scripted")
def test_a_reader_of_stdout_that_leaves_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main([*RUN, "--no-memory", "--json", str(file)]) == 0
    capsys.readouterr()
    command = [sys.executable, "-m", "dspark_edge.bench", "tables", str(file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    assert child.wait() == 1


def test_prompts_that_are_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8"):
        read_prompts(file)
