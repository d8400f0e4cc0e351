"""Where the chunks of requests wait until they are fetched: by step(), or by an iterator each.

Refuses to know rounds, and how a request is ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from .sequence import Chunk, Request, TokenLogprob


class Outbox:
    """Chunks by request. Streams may be opened and closed while another thread runs a round."""

    __slots__ = ("_for_step", "_gone", "_streams")

    def __init__(self) -> None:
        self._for_step: deque[Chunk] = deque()  # of requests that step() speaks for
        self._streams: dict[int, deque[Chunk]] = {}  # of those that an iterator speaks for
        self._gone: list[int] = []  # requests whose iterator is gone

    def put(
        self,
        request: Request,
        text: str,
        token_ids: Sequence[int],
        n_accepted: int = 0,
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str = "",
    ) -> None:
        """A chunk of the request as it stands; its finish_reason is the chunk's."""
        self._streams.get(request.id, self._for_step).append(
            Chunk(
                request_id=request.id,
                text=text,
                token_ids=tuple(token_ids),
                finish_reason=request.finish_reason,
                stats=request.stats,
                n_accepted=n_accepted,
                logprobs=logprobs,
                error=error,
            )
        )

    def take(self) -> list[Chunk]:
        """The chunks of requests without an iterator, since the last call."""
        # Another thread's abort may add to it meanwhile.
        return [self._for_step.popleft() for _ in range(len(self._for_step))]

    def open_stream(self, request_id: int) -> deque[Chunk]:
        """Where an iterator finds the request's chunks from now on."""
        chunks = self._streams[request_id] = deque()
        return chunks

    def close_stream(self, request_id: int) -> None:
        """The iterator is gone. Possibly the garbage collector says so, amid a round."""
        # A round that runs goes on speaking to it: what it says is for nobody else.
        self._gone.append(request_id)

    def silence_gone(self) -> Iterator[int]:
        """Requests whose iterator is gone, for the caller to end before it asks for the next."""
        while self._gone:
            request_id = self._gone.pop()
            yield request_id
            self._streams.pop(request_id, None)
