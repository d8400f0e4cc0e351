"""Clients that ask one of our servers at the same time, and when its tokens came.

Each client takes the next request as soon as its last one is answered. Refuses to know what is
asked and what is made of the times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .http_client import HttpClient
from .openai_url import text_of

Body: TypeAlias = Mapping[str, Any]
PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Answer:
    """One reply. Times by time.perf_counter. stats: x_dspark's, of the whole reply."""

    asked_at: float
    text: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, how many tokens
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def first_at(self) -> float:
        """When its first token came."""
        return self.arrivals[0][0]

    @property
    def last_at(self) -> float:
        """When its last token came."""
        return self.arrivals[-1][0]

    @property
    def n_tokens(self) -> int:
        """Of the whole reply."""
        return sum(n for _, n in self.arrivals)


@dataclass(slots=True)
class Batch:
    """What all clients got. by_client: each one's answers in turn."""

    answers: list[Answer]  # in the order of the requests
    by_client: list[list[Answer]]

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return max(a.last_at for a in self.answers) - min(a.asked_at for a in self.answers)

    @property
    def total_tps(self) -> float:
        """Tokens of all over the wall time of the whole batch, prompts included."""
        return sum(a.n_tokens for a in self.answers) / self.seconds

    @property
    def full_tps(self) -> float | None:
        """The same from when every client has its first token to when one is out of requests.

        None where there is no such time.
        """
        # A client that started late may have found nothing left.
        if not all(self.by_client):
            return None
        begin = max(answers[0].first_at for answers in self.by_client)
        end = min(answers[-1].last_at for answers in self.by_client)
        n_tokens = sum(n for a in self.answers for at, n in a.arrivals if begin < at <= end)
        return n_tokens / (end - begin) if end > begin and n_tokens else None


def run_batch(client: HttpClient, bodies: Sequence[Body], n_clients: int) -> Batch:
    """Sends all, n_clients at a time. Raises OSError, ValueError where one is not answered."""
    waiting = deque(enumerate(bodies))
    answers: dict[int, Answer] = {}

    def work() -> list[Answer]:
        own: list[Answer] = []
        while True:
            try:
                place, body = waiting.popleft()
            except IndexError:
                return own
            answers[place] = _ask(client, body)
            own.append(answers[place])

    with ThreadPoolExecutor(n_clients) as pool:
        working = [pool.submit(work) for _ in range(n_clients)]
        try:
            by_client = [each.result() for each in working]
        finally:
            waiting.clear()  # after a failure, or Ctrl-C, nothing new is asked
    return Batch([answers[place] for place in range(len(bodies))], by_client)


def _ask(client: HttpClient, body: Body) -> Answer:
    answer = Answer(time.perf_counter())
    for event in client.stream(PATH, {**body, "stream": True}):
        if "error" in event:
            raise ValueError(f"{client.url} failed: {event['error']}")
        told = event.get("x_dspark") or {}
        if told.get("n_tokens"):
            answer.arrivals.append((time.perf_counter(), told["n_tokens"]))
        answer.text += text_of(event)
        answer.stats = told.get("stats") or answer.stats
    if not answer.arrivals or not answer.stats:
        raise ValueError(f"{client.url} answered no tokens to {body['messages']!r:.80}")
    return answer
