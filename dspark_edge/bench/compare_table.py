"""The table of bench compare for people."""

from __future__ import annotations

from typing import Any

from .run_table import number, print_end, print_head, value_range
from .shared import say

LEGEND = (
    "\ntok/s: tokens after the first over the seconds from the first to the last. clock: told, by "
    "the program itself;\narrival, by when pieces of its stream came. tau: tokens of a pass after "
    "the first. same: replies equal to those of\nthe first mode; ties: left it where two tokens "
    "tied; other: left it elsewhere; margin: the widest lead, in logits,\nthat a token of ours had "
    "where a reply left it."
)


def print_comparison(report: dict[str, Any]) -> None:
    """One block for each set of prompts, then what the columns mean and the verdict."""
    print_head(report)
    width = max(len(line["mode"]) for line in report["modes"])
    for prompts in dict.fromkeys(line["prompts"] for line in report["modes"]):
        of_set = [line for line in report["modes"] if line["prompts"] == prompts]
        ours = of_set[0]["ours_over_it"]["ours"]
        say(f"\n{prompts}")
        say(
            f"  {'':{width}}{'tok/s':>8}{'quartiles':>16}{'x plain':>9}{ours + '/it':>14}"
            f"{'quartiles':>15}{'tau':>6}{'ttft ms':>9}{'clock':>9}"
            f"{'same':>7}{'ties':>6}{'other':>7}{'margin':>8}"
        )
        for line in of_set:
            say(_line(line, width))
    say(LEGEND)
    print_end(_verdict(report), report["busy"])


def _line(line: dict[str, Any], width: int) -> str:
    over, texts = line["ours_over_it"], line["texts"]
    counts, margin = ("-", "-", "-"), None
    if texts is not None:
        counts = (texts["n_same"], texts["n_tied"], texts["n_other"])
        margin = texts["widest_margin"]
    return (
        f"  {line['mode']:{width}}{number(line['decode_tps'], '.1f'):>8}"
        f"{value_range(line['decode_tps_quartiles'], '.1f'):>16}"
        f"{number(line['ratio_to_plain'], '.3f'):>9}"
        f"{number(over['median'], '.3f'):>14}{value_range(over['quartiles'], '.3f'):>15}"
        f"{number(line['tau'], '.2f'):>6}{1e3 * line['ttft_s']:9.1f}{line['clock']:>9}"
        f"{counts[0]:>7}{counts[1]:>6}{counts[2]:>7}{number(margin, '.3f'):>8}"
    )


def _verdict(report: dict[str, Any]) -> str:
    if report["is_failed"]:
        return "OUR OWN TEXTS DIFFER: see above"
    return "our own modes gave the same text" + ("" if report["same_text"] else ", but for ties")
