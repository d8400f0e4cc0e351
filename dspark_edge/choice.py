"""What should speculate for a target: a drafter, prompt lookup or nothing; and why.

Decided before the target is loaded. Refuses to know decoders, and whether the choice fits in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ._core import DrafterFile
from .errors import ModelError, PairError
from .models import find_drafter
from .models.gguf_header import read_header
from .models.layers import layers_of
from .speculation import Mode, Proposer

LOOKUP_LEN = 8  # draft tokens of a lookup at most, and ...
LONG_LOOKUP_LEN = 16  # ... in mode "auto", which verifies that many only where it pays


@dataclass(slots=True)
class Choice:
    """reason: why nothing speculates. n_max: draft tokens of the proposer at most.

    n_lookup: draft tokens of a lookup at most, in mode "auto". fits: the drafter whose calibration
    and lookup cache are used: the one that drafts, or the one that would belong to the target.
    """

    proposer: Proposer | None
    drafter: Path | None = None
    reason: str = ""
    n_max: int = 0
    n_lookup: int = LOOKUP_LEN
    notices: list[str] = field(default_factory=list)
    fits: Path | None = None

    def n_verified(self, mode: Mode) -> int:
        """Draft tokens per sequence at most: in mode "auto" lookup goes on beside a drafter."""
        return max(self.n_max, self.n_lookup) if self.proposer and mode == "auto" else self.n_max


def choose(path: Path | None, drafter: str | Path | None, mode: Mode) -> Choice:
    """path: the target's file, if it has one. drafter, mode: as Engine takes them.

    Raises PairError for an explicit drafter that is none.
    """
    choice = _choose(path, drafter, mode)
    choice.n_lookup = lookup_len(path)
    return choice


def lookup_len(path: Path | None) -> int:
    """Draft tokens of a lookup at most, in mode "auto"; path: the target's file, if it has one.

    A recurrent target keeps a state for each of them: more than a few cost memory.
    """
    try:
        layers = layers_of(read_header(path)) if path else []
    except (ModelError, ArithmeticError, TypeError, ValueError):
        return LOOKUP_LEN  # nonsense in the file: the loader says what
    is_known = bool(layers) and not any(layer.state_values for layer in layers)
    return LONG_LOOKUP_LEN if is_known else LOOKUP_LEN


def _choose(path: Path | None, drafter: str | Path | None, mode: Mode) -> Choice:
    if mode == "off":
        return Choice(None, reason="the model was loaded without it")
    if drafter is None:
        return Choice(None, reason="no drafter was asked for")
    if drafter == "lookup":
        return lookup(fits=find_drafter(path) if path else None)
    if drafter == "auto":
        found = find_drafter(path) if path else None
        if found is None:
            return lookup("no drafter belongs to this target: prompt lookup is used")
        try:
            return _with_drafter(found)
        except PairError as error:
            return lookup(str(error))
    if str(drafter) == "":
        raise PairError('drafter is ""; give the path of a GGUF file, "auto", "lookup" or None')
    return _with_drafter(Path(drafter).expanduser())


def lookup(*notices: str, n_lookup: int = LOOKUP_LEN, fits: Path | None = None) -> Choice:
    """Prompt lookup; notices: why no drafter. fits: as in Choice."""
    return Choice("lookup", n_max=LOOKUP_LEN, n_lookup=n_lookup, notices=list(notices), fits=fits)


def _with_drafter(drafter: Path) -> Choice:
    n_max = DrafterFile(str(drafter)).n_draft
    return Choice("drafter", drafter=drafter, n_max=n_max, fits=drafter)
