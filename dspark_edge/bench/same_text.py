"""Whether all modes give the same text, and what it was that differed.

Where two tokens tie within floating-point noise a text may differ: passes of different widths use
different kernels. So the lead that the first reply's token had there is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .summary import Key

TIE_LOGITS = 0.05  # a lead that rounding can turn round
# Of requests that share a cache, whose order of adding up follows the drafts. Up to 0.4 were seen,
# with activations of 8 bits.
SHARED_TIE_LOGITS = 0.5
TIE_HELP = (
    f"a lead in logits that counts as none; default {TIE_LOGITS:g}, and {SHARED_TIE_LOGITS:g} if "
    "several requests share a cache"
)

Lead = Callable[[Sequence[int]], float]  # of the token after these token ids of a reply, in logits


@dataclass(slots=True)
class Difference:
    """A reply that is not the first one to its prompt and seed. prompt: counted from 1."""

    prompts: str
    prompt: int
    sequences: int
    modes: list[str]  # of the first reply, of the other
    position: int  # of the first token that differs, counted from 0
    token_ids: list[int | None]  # None: that reply had ended
    min_margin: float  # lead of the first reply's token over the next best, in logits
    is_tie: bool
    n_replies: int = 1  # that differed in this way

    def __str__(self) -> str:
        first, other = self.modes
        kind = "a tie" if self.is_tie else "ANOTHER TEXT"
        return (
            f"{kind}: {self.prompts} prompt {self.prompt}, {self.sequences} sequence(s): {other} "
            f"differs from {first} at token {self.position} ({self.token_ids[1]} instead of "
            f"{self.token_ids[0]}); min_margin {self.min_margin:.3g} logits"
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict that json can write."""
        return asdict(self)


class TextCheck:
    """Compares each reply with the first that was given in its place to its prompt and seed."""

    def __init__(self, tie: float | None = None) -> None:
        """tie: lead in logits below which a difference is a tie; None: as is usual for one request,
        or for several. Raises ValueError for one that is no lead."""
        if tie is not None and not tie >= 0.0:
            raise ValueError(f"--tie is {tie}; give logits, 0 or more")
        self._tie = tie
        self._first: dict[tuple[int, str, int], tuple[str, list[int]]] = {}
        self._found: dict[tuple[Key, int, int], Difference] = {}

    @property
    def differences(self) -> list[Difference]:
        """All that were found, ties included."""
        return list(self._found.values())

    def check(
        self, key: Key, place: int, prompt: int, reply: list[int], lead: Lead
    ) -> Difference | None:
        """The difference, if there is one that was not found before.

        place: of the request in the whole run of its set, since what runs beside it matters too.
        prompt: its index in the set.
        """
        mode, first = self._first.setdefault((key.sequences, key.prompts, place), (key.mode, reply))
        if first == reply:
            return None
        both = enumerate(zip(first, reply, strict=False))
        at = next((i for i, (a, b) in both if a != b), min(len(first), len(reply)))
        if (key, place, at) in self._found:
            self._found[key, place, at].n_replies += 1
            return None
        margin = lead(first[:at])
        self._found[key, place, at] = difference = Difference(
            prompts=key.prompts,
            prompt=prompt + 1,
            sequences=key.sequences,
            modes=[mode, key.mode],
            position=at,
            token_ids=[r[at] if at < len(r) else None for r in (first, reply)],
            min_margin=margin,
            is_tie=margin < self._tie_of(key.sequences),
        )
        return difference

    def _tie_of(self, n_sequences: int) -> float:
        if self._tie is not None:
            return self._tie
        return TIE_LOGITS if n_sequences == 1 else SHARED_TIE_LOGITS
