"""The rows of bench compare: speeds, and how far each program's texts are ours.

Refuses to know how runs were made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .ratios import ALL, Runs, rows, with_all
from .same_text import Difference
from .summary import Key, pair_ratios, spread

FIELDS = (  # of a row of bench run; its others are known of our own modes only
    *(
        "mode",
        "sequences",
        "prompts",
        "n_tokens",
        "decode_tps",
        "decode_tps_quartiles",
        "decode_tps_by_repeat",
    ),
    *("ratio_to_plain", "ratio_quartiles", "ratio_by_repeat", "ratio_by_group", "ttft_s"),
)


def rows_of(
    runs: Runs,
    sets: Sequence[str],
    ours: str,
    comparable: Collection[str],
    differences: Sequence[Difference],
) -> list[dict[str, Any]]:
    """By set and program. ours: the mode of ours that each is set against. comparable: programs
    whose texts were compared. tau: None where a program does not tell its passes."""
    complete = with_all(runs, sets)
    lines = []
    for whole in rows(runs, sets):
        key = Key(whole["sequences"], whole["prompts"], whole["mode"])
        repeats = complete[key]
        over = pair_ratios(complete[Key(key.sequences, key.prompts, ours)], repeats)
        line = {name: whole[name] for name in FIELDS}
        line["tau"] = whole["tau"] or None
        line["ours_over_it"] = {"ours": ours} | spread(over)
        n_replies = sum(len(repeat) for repeat in repeats)
        line["texts"] = _texts(key, n_replies, differences) if key.mode in comparable else None
        lines.append(line)
    return lines


def _texts(key: Key, n_replies: int, differences: Sequence[Difference]) -> dict[str, Any]:
    """Replies that are the first mode's, that left it at a tie, and that left it elsewhere."""
    own = [
        each
        for each in differences
        if each.modes[1] == key.mode and key.prompts in (each.prompts, ALL)
    ]
    n_tied = sum(each.n_replies for each in own if each.is_tie)
    n_other = sum(each.n_replies for each in own if not each.is_tie)
    return {
        "n_replies": n_replies,
        "n_same": n_replies - n_tied - n_other,
        "n_tied": n_tied,
        "n_other": n_other,
        "widest_margin": max((each.min_margin for each in own), default=None),
    }
