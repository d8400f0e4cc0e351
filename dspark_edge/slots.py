"""Which sequence of the decoder runs which request, and which tokens its cache holds.

Refuses to know the decoder: what it decides, the engine carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .sequence import Request


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the decoder.

    cached: the tokens in its caches, whether a request runs on it or not. prompt: of the request
    that used it last. used_at: number of the admission, or restored cache, that used it last.
    """

    seq_id: int
    cached: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    request: Request | None = None
    used_at: int = 0


PROMPT_END = 4  # tokens at a prompt's end that a template may leave out of the next turn's prompt


class SlotTable:
    """All sequences of a decoder. running: slots with their requests, in order of admission."""

    __slots__ = ("_n_admitted", "_slots", "running")

    def __init__(self, n_seq: int) -> None:
        self._slots = [Slot(seq_id) for seq_id in range(n_seq)]
        self._n_admitted = 0
        self.running: list[tuple[Slot, Request]] = []

    def has_free(self) -> bool:
        """Whether another request can be admitted."""
        return any(slot.request is None for slot in self._slots)

    @property
    def idle(self) -> list[Slot]:
        """Slots that hold tokens for no request, the least recently used first."""
        idle = [slot for slot in self._slots if slot.request is None and slot.cached]
        return sorted(idle, key=lambda slot: slot.used_at)

    def is_known(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt goes on from one that a slot ran last, also if its cache was emptied.

        The reply in between counts for nothing: as text it may have other tokens.
        """
        prompts = [slot.prompt for slot in self._slots if slot.prompt]
        return any(n_common(p, tokens) >= max(1, len(p) - PROMPT_END) for p in prompts)

    def best(self, request: Request) -> tuple[Slot, int]:
        """The free slot to give the request, and how many of its first tokens are cached there.

        The slot whose cache gains most over what is cut off is taken, so that a begin token in
        common costs no other conversation its cache; the least recently used among equals. The
        last prompt token does not count: it is the first anchor, which stays out of the cache.
        """
        free = [slot for slot in self._slots if slot.request is None]

        def gain(slot: Slot) -> int:
            return max(2 * n_common(slot.cached, request.tokens) - len(slot.cached), 0)

        slot = max(free, key=lambda s: (gain(s), -s.used_at))
        return slot, min(n_common(slot.cached, request.tokens), request.n_past)

    def admit(self, slot: Slot, request: Request) -> None:
        """The request runs on that slot from now on."""
        self._n_admitted += 1
        slot.used_at, slot.request, slot.prompt = self._n_admitted, request, request.tokens[:]
        request.seq_id = slot.seq_id
        self.running.append((slot, request))

    def holding(self, tokens: Sequence[int]) -> Slot | None:
        """The idle slot that has most of these tokens at its start; None when none has any."""
        best = max(self.idle, key=lambda slot: n_common(slot.cached, tokens), default=None)
        return best if best is not None and n_common(best.cached, tokens) else None

    def spare(self) -> Slot | None:
        """The free slot whose cache is missed least; None when all of them run."""
        free = [slot for slot in self._slots if slot.request is None]
        return min(free, key=lambda slot: (bool(slot.cached), slot.used_at), default=None)

    def restore(self, slot: Slot, tokens: list[int]) -> None:
        """These tokens have come into a free slot's cache; that counts as its use."""
        self._n_admitted += 1
        slot.used_at, slot.cached, slot.prompt = self._n_admitted, tokens, tokens[:]

    def release(self, slot: Slot) -> None:
        """The slot's request has ended; what is cached stays."""
        slot.request = None
        self.running = [(s, r) for s, r in self.running if s is not slot]


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
