"""What passes between the event loop and the engine's thread: jobs in, pieces and snapshots out.

Refuses to know threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..engine import Engine
from ..pressure import Action
from ..sequence import Chunk, FinishReason, SamplingParams, Stats, TokenLogprob

MEMORY_PARTS = (
    *("target_model_bytes", "target_context_bytes", "target_compute_bytes"),
    *("drafter_model_bytes", "drafter_context_bytes", "drafter_compute_bytes"),
)


class Piece(NamedTuple):
    """What one round added to one reply. n_verified, n_drafted and round_s (seconds) are this
    round's; `stats` goes on changing with the request."""

    text: str
    token_ids: tuple[int, ...]
    n_accepted: int
    n_verified: int
    n_drafted: int
    round_s: float
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...]
    stats: Stats
    error: str


@dataclass(slots=True, eq=False)
class Job:
    """One request to the engine. pieces: (index, piece) as they come; several jobs of one HTTP
    request share it. accepted: done once the engine has taken the job, or refused it."""

    tokens: Sequence[int]
    params: SamplingParams
    index: int
    pieces: asyncio.Queue[tuple[int, Piece]]
    accepted: asyncio.Future[None]
    id: int = -1
    has_ended: bool = False
    stats: Stats | None = None  # from here on what the thread has told so far
    n_verified: int = 0
    n_drafted: int = 0
    decode_s: float = 0.0
    own_s: float = 0.0
    last_own_s: float = 0.0  # of the last round

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar shapes the reply."""
        return self.params.grammar is not None

    def piece(self, chunk: Chunk) -> Piece:
        """What a chunk of the engine adds to what has been told."""
        stats = self.stats = chunk.stats
        n_verified, self.n_verified = stats.n_verified - self.n_verified, stats.n_verified
        n_drafted, self.n_drafted = stats.n_drafted - self.n_drafted, stats.n_drafted
        round_s, self.decode_s = stats.decode_s - self.decode_s, stats.decode_s
        self.last_own_s, self.own_s = stats.own_s - self.own_s, stats.own_s
        return Piece(
            text=chunk.text,
            token_ids=chunk.token_ids,
            n_accepted=chunk.n_accepted,
            n_verified=n_verified,
            n_drafted=n_drafted,
            round_s=round_s,
            finish_reason=chunk.finish_reason,
            logprobs=chunk.logprobs,
            stats=stats,
            error=chunk.error,
        )

    def broken(self, error: str) -> Piece:
        """The last piece when the engine will say nothing more of this job."""
        return Piece("", (), 0, 0, 0, 0.0, "error", (), self.stats or Stats(), error)


@dataclass(slots=True, frozen=True)
class Snapshot:
    """What the engine said of itself, some time ago."""

    target: str
    drafter: str
    n_ctx: int
    speculation: str
    notices: tuple[str, ...]
    pressure: tuple[Action, ...]
    acceptance_by_position: tuple[tuple[int, int], ...]
    memory: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine) -> Snapshot:
        """Taken in the engine's thread, between rounds."""
        use = engine.memory_use()
        return cls(
            target=engine.target_name,
            drafter=engine.drafter_name,
            n_ctx=engine.n_ctx,
            speculation=engine.speculation_state,
            notices=tuple(engine.notices),
            pressure=engine.pressure,
            acceptance_by_position=tuple(engine.acceptance_by_position),
            memory={name: int(getattr(use, name)) for name in MEMORY_PARTS},
        )
