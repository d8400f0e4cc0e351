"""The table of bench run for people."""

from __future__ import annotations

from typing import Any

from .shared import say


def print_table(report: dict[str, Any]) -> None:
    """One block for each number of sequences and set of prompts, then ratios and the verdict."""
    say(f"\n{report['target']}, drafter {report['drafter']}, {report['machine']['cpu']}")
    blocks = dict.fromkeys((line["sequences"], line["prompts"]) for line in report["modes"])
    for sequences, prompts in blocks:
        say(f"\n{prompts}, {sequences} sequence(s)")
        say(
            f"  {'mode':16}{'tok/s':>8}{'quartiles':>16}{'x plain':>9}{'quartiles':>15}"
            f"{'tau':>6}{'ttft ms':>9}{'own ms':>8}{'MB':>7}{'J/tok':>7}  acceptance by position"
        )
        for line in report["modes"]:
            if (line["sequences"], line["prompts"]) == (sequences, prompts):
                say(_line(line))
    for ratio in report["ratios"]:
        say(
            f"\n{ratio['of']} ({' over '.join(ratio['modes'])}), {ratio['prompts']}, "
            f"{ratio['sequences']} sequence(s): {_number(ratio['median'], '.3f')} "
            f"({_range(ratio['quartiles'], '.3f')})"
        )
    say(f"\n{_verdict(report)}")


def _verdict(report: dict[str, Any]) -> str:
    if report["same_text"]:
        return "same text in all modes"
    n_tied = sum(each["n_replies"] for each in report["differences"] if each["is_tie"])
    n_other = sum(each["n_replies"] for each in report["differences"] if not each["is_tie"])
    tied = f"{n_tied} replies differ from a tie on"
    return f"TEXTS DIFFER in {n_other} replies; {tied}" if n_other else f"same text, but {tied}"


def _line(line: dict[str, Any]) -> str:
    rates = [each["rate"] for each in line["acceptance_by_position"]]
    peak = line["peak_rss_bytes"]
    return (
        f"  {line['mode']:16}{_number(line['decode_tps'], '.1f'):>8}"
        f"{_range(line['decode_tps_quartiles'], '.1f'):>16}"
        f"{_number(line['ratio_to_plain'], '.3f'):>9}"
        f"{_range(line['ratio_quartiles'], '.3f'):>15}"
        f"{line['tau']:6.2f}{1e3 * line['ttft_s']:9.1f}{line['own_ms_per_round']:8.3f}"
        f"{_number(None if peak is None else peak / 1e6, '.0f'):>7}"
        f"{_number(line['joules_per_token'], '.2f'):>7}  "
        + " ".join(_number(rate, ".2f") for rate in rates)
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _range(values: list[float] | None, form: str) -> str:
    return "-" if values is None else " - ".join(format(value, form) for value in values)
