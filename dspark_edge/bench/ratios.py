"""The rows of bench run, and ratios of modes other than plain.

Refuses to know how runs were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .modes import BenchMode
from .summary import Key, Repeats, decode_tps, pair_ratios, row, spread

Runs: TypeAlias = dict[Key, Repeats]

ALL = "all"  # the sets together
BEST_FIXED = "best-fixed"


def rows(runs: Runs, sets: Sequence[str]) -> list[dict[str, Any]]:
    """By sequences, set and mode; where there are several sets, also all of them together."""
    complete = with_all(runs, sets)
    return [
        row(key, repeats, complete.get(Key(key.sequences, key.prompts, "plain")))
        for key, repeats in complete.items()
    ]


def with_all(runs: Mapping[Key, Repeats], sets: Sequence[str]) -> Runs:
    """The runs, and for several sets their union under ALL."""
    complete = dict(runs)
    for key in runs if len(sets) > 1 else ():
        of_sets = [runs[Key(key.sequences, name, key.mode)] for name in sets]
        together = [
            [run for part in repeat for run in part] for repeat in zip(*of_sets, strict=True)
        ]
        complete[Key(key.sequences, ALL, key.mode)] = together
    return complete


def check_ratio(asked: str | None, modes: Sequence[BenchMode]) -> tuple[str, str] | None:
    """A and B of --ratio-of; without it auto and the best fixed mode, None unless both are run.

    Raises ValueError when A or B is not run.
    """
    names = {mode.name for mode in modes}
    if any(mode.is_fixed for mode in modes):
        names.add(BEST_FIXED)
    if asked is None:
        return ("auto", BEST_FIXED) if {"auto", BEST_FIXED} <= names else None
    above, slash, below = asked.partition("/")
    for name in (above, below):
        if not slash or name not in names:
            raise ValueError(
                f"--ratio-of is {asked!r}; give A/B, each one of {', '.join(sorted(names))}"
            )
    return above, below


def named_ratios(
    runs: Runs, sets: Sequence[str], modes: Sequence[BenchMode], pair: tuple[str, str] | None
) -> list[dict[str, Any]]:
    """Speed of the first of the pair over the second, for each number of sequences and set."""
    if pair is None:
        return []
    fixed = [mode.name for mode in modes if mode.is_fixed]
    cells: dict[tuple[int, str], dict[str, Repeats]] = {}
    for key, repeats in with_all(runs, sets).items():
        cells.setdefault((key.sequences, key.prompts), {})[key.mode] = repeats
    found = []
    for (sequences, prompts), cell in cells.items():
        one, other = (_resolve(name, cell, fixed) for name in pair)
        found.append(
            {"of": "/".join(pair), "modes": [one, other]}
            | {"sequences": sequences, "prompts": prompts}
            | spread(pair_ratios(cell[one], cell[other]))
        )
    return found


def _resolve(name: str, cell: Mapping[str, Repeats], fixed: Sequence[str]) -> str:
    """A mode's name; BEST_FIXED is the one that, looking back, was the fastest here."""
    if name != BEST_FIXED:
        return name
    return max(fixed, key=lambda mode: statistics.median(map(decode_tps, cell[mode])))
