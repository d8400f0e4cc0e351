"""Lines that a terminal would fold into too many rows, made to fit: the longest lose their middle.

A path or a reason is told by its beginning and its end. Refuses to know what is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fitted(
    lines: Sequence[str], *, most_rows: int, columns: int, n_rows_of: Callable[[str], int]
) -> list[str]:
    """The lines, in at most `most_rows` rows of `columns` cells, or in one row each where there are
    more lines than rows. Of equally long ones the first is shortened: what matters most comes last.
    n_rows_of: into how many rows a line is folded."""
    shown = list(lines)
    while sum(map(n_rows_of, shown)) > most_rows:
        longest = max(range(len(shown)), key=lambda i: n_rows_of(shown[i]))
        n_rows = n_rows_of(shown[longest]) - 1
        if n_rows < 1:
            break
        n_kept = min(len(lines[longest]), n_rows * columns)
        while n_kept > 1 and n_rows_of(shown[longest]) > n_rows:
            n_kept -= 1
            shown[longest] = _without_middle(lines[longest], n_kept)
    return shown


def _without_middle(line: str, n_kept: int) -> str:
    n_head = (n_kept + 1) // 2
    return f"{line[:n_head]}…{line[len(line) - (n_kept - n_head) :]}"
