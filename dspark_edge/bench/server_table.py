"""The table of bench server for people."""

from __future__ import annotations

from typing import Any

from .run_table import copies, number, print_end, print_head, value_range
from .shared import say

LEGEND = (
    "\ntok/s: tokens of all clients over the wall time of the batch, prompts included; while full: "
    "from when every\nclient has its first token to when one is out of requests. x plain: over the "
    "server without speculation, pair by\npair. ttft: from a request to its first token, median "
    "and 95th percentile."
)


def print_servers(report: dict[str, Any]) -> None:
    """One block for each number of clients, then what the columns mean and the verdict."""
    print_head(report)
    for clients in dict.fromkeys(line["clients"] for line in report["modes"]):
        of_count = [line for line in report["modes"] if line["clients"] == clients]
        same = "".join({copies(report["prompts"], name, clients) for name in report["prompts"]})
        say(f"\n{clients} client(s), {of_count[0]['n_requests']} requests{same}")
        say(
            f"  {'server':8}{'tok/s':>8}{'quartiles':>16}{'x plain':>9}{'quartiles':>15}"
            f"{'while full':>12}{'x plain':>9}{'quartiles':>15}"
            f"{'ttft ms':>9}{'p95':>8}{'x plain':>9}{'p95':>7}{'tau':>6}"
        )
        for line in of_count:
            say(_line(line))
    say(LEGEND)
    idle = ", ".join(f"{name} {share:.1%}" for name, share in report["idle_share"].items())
    say(f"of one processor, taken by each server while the other one was asked: {idle}")
    print_end(_verdict(report), report["busy"])


def _line(line: dict[str, Any]) -> str:
    return (
        f"  {line['mode']:8}{line['total_tps']:8.1f}"
        f"{value_range(line['total_tps_quartiles'], '.1f'):>16}"
        f"{number(line['ratio_to_plain'], '.3f'):>9}"
        f"{value_range(line['ratio_to_plain_quartiles'], '.3f'):>15}"
        f"{number(line['full_tps'], '.1f'):>12}"
        f"{number(line['full_ratio_to_plain'], '.3f'):>9}"
        f"{value_range(line['full_ratio_to_plain_quartiles'], '.3f'):>15}"
        f"{1e3 * line['ttft_s']:9.1f}{1e3 * line['ttft_p95_s']:8.1f}"
        f"{number(line['ttft_ratio_to_plain'], '.3f'):>9}"
        f"{number(line['ttft_p95_ratio_to_plain'], '.3f'):>7}"
        f"{line['tau']:6.2f}"
    )


def _verdict(report: dict[str, Any]) -> str:
    if report["is_failed"]:
        return "TEXTS DIFFER between the servers: see above"
    return "both servers gave the same texts" + ("" if report["same_text"] else ", but for ties")
