"""The chunks of one request as an iterator, which ends the request when nobody wants more of it.

Refuses to know what a chunk holds and how it is made: the engine gives it the means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from .errors import DecodeError
from .sequence import Chunk


class Stream(Iterator[Chunk]):
    """Chunks of one request, made as they are asked for.

    Closing or dropping it aborts the request, also when it was never read. next() raises
    DecodeError when the request has failed.
    """

    __slots__ = ("_chunks", "_end", "_ended", "_work")

    def __init__(
        self, chunks: deque[Chunk], *, work: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """chunks: where the engine puts them. work: lets it go on. end: no more are wanted."""
        self._chunks = chunks
        self._work = work
        self._end = end
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            while not self._chunks:
                self._work()
        except BaseException:
            self.close()  # as a generator would: an interrupted request does not run on
            raise
        chunk = self._chunks.popleft()
        if chunk.finish_reason is not None:
            self.close()
        if chunk.finish_reason == "error":
            raise DecodeError(chunk.error)
        return chunk

    def close(self) -> None:
        """Aborts the request if it has not ended; nothing comes any more."""
        if not self._ended:
            self._ended = True
            self._end()

    def __del__(self) -> None:
        self.close()
