"""bench tables: reports of bench run, compare and server as Markdown, so that nobody types figures.

Refuses to know how they were measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .busy import caveat
from .run_table import number
from .shared import Commands

Row: TypeAlias = Mapping[str, Any]  # of a report's `modes`


def tables(args: argparse.Namespace) -> str:
    """Markdown of all files, in their order."""
    return "\n\n".join(markdown_of(_read(path)) for path in args.files)


def _read(path: Path) -> dict[str, Any]:
    """The report in a file: the whole of it, or its last line. Raises ValueError, OSError."""
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        report = json.loads(lines[-1] if lines else "")
    except ValueError:
        report = None
    if not isinstance(report, dict) or not {"modes", "settings", "machine"} <= report.keys():
        raise ValueError(
            f"{path} is no report of bench run, compare or server; give what --json wrote"
        )
    return report


def markdown_of(report: dict[str, Any]) -> str:
    """What was measured, the table, and what speaks against relying on it."""
    if "programs" in report:
        table = _compared(report)
    elif "servers" in report:
        table = _served(report)
    else:
        table = _ran(report)
    return "\n\n".join([_heading(report), table, *_warnings(report)])


def _heading(report: dict[str, Any]) -> str:
    settings = report["settings"]
    n_threads = settings["threads"] or report["machine"]["physical_cores"]
    parts = [
        f"{report['target']}, drafter {report['drafter']}",
        report["machine"]["cpu"],
        f"{n_threads} thread(s)",
        f"llama-cpp-python {report['machine']['llama_cpp']}",
        f"temperature {settings['temperature']:g}, {settings['max_tokens']} tokens a reply",
        f"{_n_repeats(report)} repeat(s)",
    ]
    return "; ".join(parts) + "."


def _n_repeats(report: dict[str, Any]) -> int:
    """That were run: time may have ended them before settings.repeats."""
    row = report["modes"][0]
    return len(row.get("decode_tps_by_repeat") or row.get("total_tps_by_repeat") or [])


def _warnings(report: dict[str, Any]) -> list[str]:
    n_other = sum(d["n_replies"] for d in report["differences"] if not d["is_tie"])
    differing = [f"**Texts of our own modes differ** ({n_other} replies)."]
    return (differing if report["is_failed"] else []) + (
        [f"**{caveat(report['busy'])}.**"] if report.get("busy") else []
    )


def _ran(report: dict[str, Any]) -> str:
    rows = report["modes"]
    # Who has only ever asked for one sequence need not read about sequences.
    is_single = {row["sequences"] for row in rows} == {1}
    head = ["prompts", *([] if is_single else ["sequences"]), "mode"]
    return _table(
        [*head, "tok/s", "x plain (quartiles)", "tau", "acceptance"],
        [
            [
                row["prompts"],
                *([] if is_single else [str(row["sequences"])]),
                row["mode"],
                number(row["decode_tps"], ".1f"),
                _spread(row["ratio_to_plain"], row["ratio_quartiles"]),
                number(row["tau"], ".2f"),
                _accepted(row),
            ]
            for row in rows
        ],
    )


def _accepted(row: Row) -> str:
    """Share of right ones among the draft tokens that were judged."""
    n_right = sum(each["n_right"] for each in row["acceptance_by_position"])
    n_judged = sum(each["n"] for each in row["acceptance_by_position"])
    return f"{n_right / n_judged:.2f}" if n_judged else "-"


def _compared(report: dict[str, Any]) -> str:
    rows = report["modes"]
    ours = rows[0]["ours_over_it"]["ours"]
    return _table(
        [
            "prompts",
            "program",
            "tok/s",
            f"{ours} over it (quartiles)",
            "x plain",
            "tau",
            "same text",
        ],
        [
            [
                row["prompts"],
                row["mode"],
                number(row["decode_tps"], ".1f"),
                _spread(row["ours_over_it"]["median"], row["ours_over_it"]["quartiles"]),
                number(row["ratio_to_plain"], ".2f"),
                number(row["tau"], ".2f"),
                _same(row["texts"]),
            ]
            for row in rows
        ],
    )


def _same(texts: dict[str, Any] | None) -> str:
    """How many replies are ours; those that left ours at a tie apart."""
    if texts is None:
        return "-"
    tied = f", {texts['n_tied']} tied" if texts["n_tied"] else ""
    return f"{texts['n_same']} of {texts['n_replies']}{tied}"


def _served(report: dict[str, Any]) -> str:
    return _table(
        [
            *("clients", "server", "tok/s", "x plain (quartiles)"),
            *("tok/s while full", "x plain (quartiles)", "ttft ms (95 %)", "x plain", "tau"),
        ],
        [
            [
                str(row["clients"]),
                row["mode"],
                number(row["total_tps"], ".1f"),
                _spread(row["ratio_to_plain"], row["ratio_to_plain_quartiles"]),
                number(row["full_tps"], ".1f"),
                _spread(row["full_ratio_to_plain"], row["full_ratio_to_plain_quartiles"]),
                f"{1e3 * row['ttft_s']:.0f} ({1e3 * row['ttft_p95_s']:.0f})",
                number(row["ttft_ratio_to_plain"], ".2f"),
                number(row["tau"], ".2f"),
            ]
            for row in report["modes"]
        ],
    )


def _spread(median: float | None, quartiles: Sequence[float] | None) -> str:
    if median is None or quartiles is None:
        return "-"
    low, high = quartiles
    return f"{median:.2f} ({low:.2f} - {high:.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def add_commands(commands: Commands) -> None:
    """Adds `tables`."""
    command = commands.add_parser("tables", help="reports (--json) as Markdown tables")
    command.set_defaults(run=tables)
    command.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
