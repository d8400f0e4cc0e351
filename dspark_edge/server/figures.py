"""What replies of both kinds share: the prompt's size, usage, statistics, log-probabilities.

Refuses to know what the text means.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..sequence import Stats, TokenLogprob
from .errors import ApiError
from .hub import Served
from .jobs import Piece
from .settings import Limits
from .vocabulary import Vocabulary

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def check_prompt(
    text: str, served: Served, limits: Limits, *, add_special: bool, name: str
) -> list[int]:
    """The tokens of a prompt that fits. name: the parameter that it comes from, for errors.

    Raises ApiError, ValueError for text that is not Unicode.
    """
    n_ctx = n_ctx_of(served)
    most = n_ctx * limits.bytes_per_token
    if len(text) > most:
        raise ApiError(
            400,
            f"the prompt has {len(text)} characters; the context holds {n_ctx} tokens, "
            f"so the limit is {most}",
            code="context_length_exceeded",
            param=name,
        )
    tokens = served.text.vocabulary.tokenize(text, add_special=add_special)
    return check_tokens(tokens, served, name=name)


def check_tokens(tokens: list[int], served: Served, *, name: str) -> list[int]:
    """The tokens, when there are any and the context holds them. Raises ApiError."""
    n_ctx = n_ctx_of(served)
    if not tokens:
        raise ApiError(400, f"{name} has no tokens; give at least one", param=name)
    if len(tokens) > n_ctx:
        raise ApiError(
            400,
            f"prompt has {len(tokens)} tokens but the context holds {n_ctx}; "
            "start the server with a larger --ctx or shorten it",
            code="context_length_exceeded",
            param=name,
        )
    vocabulary = served.text.vocabulary
    bad = next((token for token in tokens if token >= vocabulary.n_tokens), None)
    if bad is not None:
        raise ApiError(
            400,
            f"{name} has token {bad}; this model has ids 0 to {vocabulary.n_tokens - 1}",
            param=name,
            code="invalid_value",
        )
    return tokens


def n_ctx_of(served: Served) -> int:
    """Tokens that one sequence can hold."""
    snapshot = served.thread.snapshot
    if snapshot is None:
        raise RuntimeError("the engine's thread has no engine")
    return snapshot.n_ctx


def token_logprobs(
    logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """Log-probabilities in the chat form."""
    return [
        {
            **_token(each.token_id, each.logprob, vocabulary),
            "top_logprobs": [_token(token, value, vocabulary) for token, value in each.top],
        }
        for each in logprobs
    ]


def _token(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.token_bytes(token, special=True)
    return {
        "token": data.decode("utf-8", errors="replace"),
        "bytes": list(data),
        "logprob": finite(logprob),
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


class Extras:
    """x_dspark of a stream's events: what the rounds since the last event have gained."""

    __slots__ = ("_n_accepted", "_n_tokens", "_n_verified", "_pieces", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        """vocabulary: None, or what turns tokens into the texts of `pieces`."""
        self._vocabulary = vocabulary
        self._n_tokens = self._n_accepted = self._n_verified = 0
        self._pieces: list[tuple[str, bool]] = []

    def add(self, piece: Piece) -> None:
        """Takes a piece that has not been told yet."""
        self._n_tokens += len(piece.token_ids)
        self._n_accepted += piece.n_accepted
        self._n_verified += piece.n_verified
        if self._vocabulary is not None:
            for i, token in enumerate(piece.token_ids):
                text = self._vocabulary.token_bytes(token).decode("utf-8", errors="replace")
                self._pieces.append((text, i < piece.n_accepted))

    def tell(self, piece: Piece, *, is_last: bool) -> dict[str, Any]:
        """The counts, and with the last event the statistics of the whole reply."""
        told: dict[str, Any] = {
            "n_tokens": self._n_tokens,
            "n_accepted": self._n_accepted,
            "n_verified": self._n_verified,
        }
        if self._vocabulary is not None:
            told["pieces"] = self._pieces
        self._n_tokens = self._n_accepted = self._n_verified = 0
        self._pieces = []
        return told | {"stats": stats_json(piece.stats)} if is_last else told


def stats_json(stats: Stats) -> dict[str, Any]:
    """The statistics of one reply. Times in seconds."""
    return {
        "seed": stats.seed,
        "n_prompt": stats.n_prompt,
        "n_reused": stats.n_reused,
        "n_tokens": stats.n_tokens,
        "n_rounds": stats.n_rounds,
        "n_drafted": stats.n_drafted,
        "n_verified": stats.n_verified,
        "n_accepted": stats.n_accepted,
        "tau": round(stats.tau, 3),
        "acceptance": round(stats.acceptance, 4),
        "tps": round(stats.tps, 2),
        "ttft_s": round(stats.ttft_s, 4),
        "prefill_s": round(stats.prefill_s, 4),
        "decode_s": round(stats.decode_s, 4),
        "own_s": round(stats.own_s, 4),
        "min_margin": stats.min_margin if math.isfinite(stats.min_margin) else None,
        "speculation": stats.speculation,
    }


class Usage:
    """The frame around choices: id, model, token counts, statistics."""

    def __init__(self, kind: str, model: str, *, n_per_prompt: int, tells: bool) -> None:
        """kind: OpenAI's object name. n_per_prompt: choices of one prompt, next to each other.
        tells: whether a stream ends with the counts."""
        is_chat = kind == "chat.completion"
        self._kind = kind
        self._chunk_kind = "chat.completion.chunk" if is_chat else kind
        self._frame = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._n_per_prompt = n_per_prompt
        self._tells = tells
        self._stats: dict[int, Stats] = {}

    def add(self, index: int, piece: Piece) -> None:
        """Takes note of a choice's statistics."""
        self._stats[index] = piece.stats

    def event(self, choices: list[dict[str, Any]], extras: dict[str, Any]) -> dict[str, Any]:
        """One object of a stream."""
        event = {**self._frame, "object": self._chunk_kind, "choices": choices, "x_dspark": extras}
        return event | {"usage": None} if self._tells else event

    def last_events(self) -> list[dict[str, Any]]:
        """The token counts, where they were asked for."""
        if not self._tells:
            return []
        frame = {**self._frame, "object": self._chunk_kind, "choices": []}
        return [frame | {"usage": self._counts()}]

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply that is not a stream. x_dspark: statistics, one for each choice."""
        return {
            **self._frame,
            "object": self._kind,
            "choices": choices,
            "usage": self._counts(),
            "x_dspark": {"stats": [stats_json(self._stats[i]) for i in sorted(self._stats)]},
        }

    def _counts(self) -> dict[str, Any]:
        # A prompt is counted once, however many choices it has.
        firsts = [s for i, s in self._stats.items() if i % self._n_per_prompt == 0]
        n_prompt = sum(s.n_prompt for s in firsts)
        n_emitted = sum(s.n_tokens for s in self._stats.values())
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_emitted,
            "total_tokens": n_prompt + n_emitted,
            "prompt_tokens_details": {"cached_tokens": sum(s.n_reused for s in firsts)},
        }
