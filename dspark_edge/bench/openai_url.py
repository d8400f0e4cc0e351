"""Any server with OpenAI's API as a program of bench compare.

It gets the message and makes the prompt itself, so its texts are ours only if its template, model
and files are. Refuses to know who serves.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from ..sequence import SamplingParams
from .http_client import HttpClient
from .programs import Clock, Question, Reply, Tokenize


def check_url(url: str) -> str:
    """The URL as OpenAI's clients take it. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url is {url!r}; give one such as http://127.0.0.1:8080/v1")
    return url


class OpenAIUrl:
    """Streamed chat completions. about.model: the first that the server lists."""

    clock: Clock = "arrival"

    def __init__(self, url: str, tokenize: Tokenize, api_key: str | None = None) -> None:
        """url: with the version, as OpenAI's clients take it. Raises OSError, ValueError."""
        self.name = url
        self._client = HttpClient(url, api_key)
        self._tokenize = tokenize
        models = self._client.get("/models").get("data") or [{}]
        self._model = str(models[0].get("id", "default"))
        self.about: dict[str, Any] = {"url": url, "model": self._model}

    def reply(self, question: Question, params: SamplingParams) -> Reply:
        """As Program has it; tokens are counted by the server, or else by our tokenizer."""
        start = time.perf_counter()
        first = last = 0.0
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        for event in self._client.stream("/chat/completions", self._body(question, params)):
            if "error" in event:
                raise ValueError(f"{self.name} failed: {event['error']}")
            usage = event.get("usage") or usage
            timings = event.get("timings") or timings
            piece = text_of(event)
            if piece:
                last = time.perf_counter()
                first = first or last
                pieces.append(piece)
        if not pieces:
            raise ValueError(f"{self.name} answered nothing to {question.text[:40]!r}")
        text = "".join(pieces)
        n_tokens = usage.get("completion_tokens") or len(self._tokenize(text))
        n_first = len(self._tokenize(pieces[0]))
        return Reply(
            text=text,
            token_ids=None,
            n_decoded=n_tokens - n_first,
            n_rounds=rounds_told(timings),
            ttft_s=first - start,
            decode_s=last - first,
        )

    def _body(self, question: Question, params: SamplingParams) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def close(self) -> None:
        """Nothing is held."""


def text_of(event: dict[str, Any]) -> str:
    """What an event of a streamed chat completion adds to the reply, thoughts included."""
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or ""


def rounds_told(timings: dict[str, Any]) -> int | None:
    """Target passes after the first token, as llama-server's timings tell; None: they don't.

    Its first token comes from the prompt's own pass; each later pass gives what was accepted and
    one token more.
    """
    if "predicted_n" not in timings:
        return None
    n_decoded = timings["predicted_n"] - 1
    return int(n_decoded - timings.get("draft_n_accepted", 0))
