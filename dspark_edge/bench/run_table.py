"""The table of bench run for people."""

from __future__ import annotations

from typing import Any

from .busy import caveat
from .ratios import ALL
from .shared import say


def print_table(report: dict[str, Any]) -> None:
    """One block for each number of sequences and set of prompts, then ratios and the verdict."""
    say(f"\n{report['target']}, drafter {report['drafter']}, {report['machine']['cpu']}")
    blocks = dict.fromkeys((line["sequences"], line["prompts"]) for line in report["modes"])
    for sequences, prompts in blocks:
        say(f"\n{prompts}, {sequences} sequence(s){copies(report['prompts'], prompts, sequences)}")
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
            f"{ratio['sequences']} sequence(s): {number(ratio['median'], '.3f')} "
            f"({value_range(ratio['quartiles'], '.3f')})"
        )
    print_end(_verdict(report), report["busy"])


def print_head(report: dict[str, Any]) -> None:
    """What was measured on what, of a report of whole programs."""
    settings = report["settings"]
    say(
        f"\n{report['target']}, drafter {report['drafter']}, {report['machine']['cpu']}, "
        f"{settings['threads']} threads, temperature {settings['temperature']:g}"
    )


def print_end(verdict: str, busy: str | None) -> None:
    """What belongs under a table. busy: the report's reason."""
    say(f"\n{verdict}")
    if busy is not None:
        say(caveat(busy))


def copies(n_prompts: dict[str, int], prompts: str, sequences: int) -> str:
    """Says where the same prompt runs more than once at a time, which no user would do."""
    few = [
        f"{name} has {n}"
        for name, n in n_prompts.items()
        if prompts in (name, ALL) and n < sequences
    ]
    return f": {', '.join(few)} prompt(s), so copies run side by side" if few else ""


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
        f"  {line['mode']:16}{number(line['decode_tps'], '.1f'):>8}"
        f"{value_range(line['decode_tps_quartiles'], '.1f'):>16}"
        f"{number(line['ratio_to_plain'], '.3f'):>9}"
        f"{value_range(line['ratio_quartiles'], '.3f'):>15}"
        f"{line['tau']:6.2f}{1e3 * line['ttft_s']:9.1f}{line['own_ms_per_round']:8.3f}"
        f"{number(None if peak is None else peak / 1e6, '.0f'):>7}"
        f"{number(line['joules_per_token'], '.2f'):>7}  "
        + " ".join(number(rate, ".2f") for rate in rates)
    )


def number(value: float | None, form: str) -> str:
    """The number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def value_range(values: list[float] | None, form: str) -> str:
    """Two numbers, or a dash."""
    return "-" if values is None else " - ".join(format(value, form) for value in values)
