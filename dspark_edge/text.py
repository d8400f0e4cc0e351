"""Bytes of tokens to text that is safe to show.

Owns: whole UTF-8 characters, and the cut before a stop string.
Refuses to know: tokens, sampling and who reads the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into whole characters, cut before the first completed stop string.

    The stop string whose last character comes first wins; on a tie, the one that starts first.
    The text, push() after push() and then flush(), does not depend on how the bytes are split.
    stopped: whether a stop string was completed. stop_string: which one, or None.
    """

    __slots__ = ("_decoder", "_held", "_is_whole", "_stop", "stop_string", "stopped")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raises ValueError when `stop` is a bare string or holds an empty one."""
        if isinstance(stop, str):
            raise ValueError(f"stop {stop!r} is a string but a list is needed; pass [{stop!r}]")
        if "" in stop:
            raise ValueError("stop holds an empty string, which would end every text; remove it")
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True  # no incomplete character waits in the decoder
        self._held = ""  # longest end of the text that is the beginning of a stop string
        self.stopped = False
        self.stop_string: str | None = None

    def push(self, piece: bytes) -> str:
        """Take the next bytes; return the text that is now safe to show, maybe "".

        Incomplete characters, and text that could still become a stop string, are held back.
        The push that completes a stop string returns the text before it; later ones return "".
        """
        if self._is_whole and piece.isascii():  # most tokens; the decoder is much slower
            text = piece.decode("ascii")
        else:
            text = self._decoder.decode(piece)
            self._is_whole = not self._decoder.getstate()[0]
        if not self._stop:
            return text
        return "" if self.stopped else self._advance(text)

    def flush(self) -> str:
        """End of the text: return what is held back, incomplete bytes as U+FFFD."""
        if self.stopped:
            return ""
        shown = self._advance(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return shown + held

    def _advance(self, new: str) -> str:
        text = self._held + new
        # Nothing shown earlier can be part of a stop string, so looking from _held on is enough.
        found = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            _, start, self.stop_string = min(found)
            self.stopped, self._held = True, ""
            return text[:start]
        n_held = self._n_held(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def _n_held(self, text: str) -> int:
        """Number of last characters that may be the beginning of a stop string."""
        for n in range(min(len(text), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop):
                return n
        return 0
