"""One of our own modes as a program of bench compare, in this process.

Refuses to know the other programs.
"""

from __future__ import annotations

from typing import Any

from ..sequence import SamplingParams
from .measure import run_group
from .modes import Opened
from .programs import Clock, Question, Reply


class OurMode:
    """An engine in one mode. about.speculation: its state when it was closed."""

    clock: Clock = "told"

    def __init__(self, opened: Opened) -> None:
        self.name = opened.mode.name
        self.about: dict[str, Any] = {"notices": opened.engine.notices}
        self._opened = opened

    def reply(self, question: Question, params: SamplingParams) -> Reply:
        """As Program has it. Raises DecodeError."""
        run = run_group(self._opened.engine, [question.token_ids], [params])
        (token_ids,) = run.replies
        bytes_of = self._opened.loaded.decoder.token_bytes
        return Reply(
            text=b"".join(map(bytes_of, token_ids)).decode("utf-8", errors="ignore"),
            token_ids=token_ids,
            n_decoded=run.n_tokens,
            n_rounds=len(run.rounds),
            ttft_s=run.stats[0].ttft_s,
            decode_s=run.seconds,
        )

    def close(self) -> None:
        """Frees the models."""
        self.about["speculation"] = self._opened.engine.speculation_state
        self._opened.engine.close()
