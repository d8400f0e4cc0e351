"""bench tables: figures land in the right cells, and doubts beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_edge.bench.__main__ import main
from dspark_edge.bench.tables import markdown_of

FRAME: dict[str, Any] = {
    "target": "t.gguf",
    "drafter": "d.gguf",
    "machine": {"cpu": "A CPU", "physical_cores": 2, "llama_cpp": "0.3.36"},
    "settings": {"threads": None, "temperature": 0.7, "max_tokens": 64},
    "busy": None,
    "is_failed": False,
    "differences": [],
}
HEADING = (
    "t.gguf, drafter d.gguf; A CPU; 2 thread(s); llama-cpp-python 0.3.36; "
    "temperature 0.7, 64 tokens a reply; 2 repeat(s)."
)


def ran(mode: str, ratio: float | None, **fields: Any) -> dict[str, Any]:
    line = {
        "mode": mode,
        "sequences": 1,
        "prompts": "chat",
        "decode_tps": 98.76,
        "decode_tps_by_repeat": [98.0, 99.5],
        "ratio_to_plain": ratio,
        "ratio_quartiles": None if ratio is None else [ratio - 0.1, ratio + 0.1],
        "tau": 1.5,
        "acceptance_by_position": [],
    }
    return line | fields


def table_of(report: dict[str, Any]) -> list[str]:
    return [line for line in markdown_of(report).splitlines() if line.startswith("|")]


def test_a_run_is_a_row_for_each_set_and_mode() -> None:
    positions = [{"n_right": 6, "n": 8, "rate": 0.75}, {"n_right": 1, "n": 2, "rate": 0.5}]
    rows = [ran("plain", 1.0), ran("auto", 1.25, acceptance_by_position=positions)]
    report = FRAME | {"modes": rows}
    assert markdown_of(report).splitlines()[0] == HEADING
    assert table_of(report) == [
        "| prompts | mode | tok/s | x plain (quartiles) | tau | acceptance |",
        "| --- | --- | --- | --- | --- | --- |",
        "| chat | plain | 98.8 | 1.00 (0.90 - 1.10) | 1.50 | - |",
        "| chat | auto | 98.8 | 1.25 (1.15 - 1.35) | 1.50 | 0.70 |",
    ]


def test_several_numbers_of_sequences_have_a_column() -> None:
    report = FRAME | {"modes": [ran("auto", None), ran("auto", None, sequences=4)]}
    head, _, *rows = table_of(report)
    assert head.startswith("| prompts | sequences | mode |")
    assert [row.split(" | ")[1] for row in rows] == ["1", "4"]
    assert rows[0].endswith("| 98.8 | - | 1.50 | - |")


def test_a_comparison_tells_texts_apart() -> None:
    over = {"ours": "auto", "median": 2.0, "quartiles": [1.9, 2.2]}
    texts = {"n_replies": 9, "n_same": 7, "n_tied": 1, "n_other": 1, "widest_margin": 0.4}
    rows = [
        ran("auto", 1.2, ours_over_it=over | {"median": 1.0, "quartiles": [1.0, 1.0]}, texts=None),
        ran("a|b", None, ours_over_it=over, texts=texts, tau=None),
    ]
    assert table_of(FRAME | {"programs": {}, "modes": rows}) == [
        "| prompts | program | tok/s | auto over it (quartiles) | x plain | tau | same text |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| chat | auto | 98.8 | 1.00 (1.00 - 1.00) | 1.20 | 1.50 | - |",
        "| chat | a\\|b | 98.8 | 2.00 (1.90 - 2.20) | - | - | 7 of 9, 1 tied |",
    ]


def test_doubts_are_under_the_table() -> None:
    """A table that is copied must not lose them."""
    different = {"n_replies": 3, "is_tie": False}
    report = FRAME | {
        "modes": [ran("plain", 1.0)],
        "busy": "others ran",
        "is_failed": True,
        "differences": [different, {"n_replies": 1, "is_tie": True}],
    }
    *_, failed, _, busy = markdown_of(report).splitlines()
    assert "differ** (3 replies)" in failed
    assert "others ran" in busy


def test_several_files_are_rendered_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("b", "a"):
        files.append(tmp_path / f"{name}.json")
        report = FRAME | {"target": f"{name}.gguf", "modes": [ran("plain", 1.0)]}
        # As it is when a whole stdout was kept: the report is its last line.
        files[-1].write_text("something else\n" + json.dumps(report) + "\n")
    assert main(["tables", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert out.index("b.gguf") < out.index("a.gguf")


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"modes": []}'])
def test_what_is_no_report_is_refused_by_name(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.json"
    file.write_text(content)
    assert main(["tables", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{file} is no report" in shown.err


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "nowhere.json"]) == 1
    assert "nowhere.json" in capsys.readouterr().err
