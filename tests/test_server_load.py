"""Many clients at once, with cancels and disconnects: each request ends in what it should.

The three minutes that count: python tests/test_server_load.py --seconds 180
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from server_harness import WAIT_S, Running, running, tiny_settings
from tiny_models import DrafterSpec, TargetSpec, write_drafter, write_llama

from dspark_edge.server.settings import EngineOptions

N_CLIENTS = 64
CI_SECONDS = 12.0
N_QUESTIONS = 24
NOISE = 8e-3  # logits: draws closer than this may swap; margins were seen to move by 0.004
MAX_GROWTH = 0.15  # of the process, once every client has been served


@dataclass(slots=True)
class Outcome:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Question:
    """A request with its reply when it is alone, and how narrow that reply's closest draw was."""

    body: dict[str, Any]
    expected: str
    margin: float


def questions(server: Running) -> list[Question]:
    """Greedy and seeded requests of many sizes, asked one after the other."""
    sizes = random.Random(5)
    asked = []
    for i in range(N_QUESTIONS):
        content = f"question {i} " + "the in of " * sizes.randrange(60)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": sizes.randrange(1, 120),
            **({"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}),
        }
        response = server.post("/v1/chat/completions", body)
        while response.status_code == 429:  # after the load new ones are refused for some seconds
            time.sleep(0.5)
            response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        reply = response.json()
        margin = reply["x_dspark"]["stats"][0]["min_margin"]
        asked.append(Question(body, reply["choices"][0]["message"]["content"], margin))
    return asked


async def ask(client: httpx.AsyncClient, asked: Question, chance: random.Random) -> tuple[str, str]:
    """(outcome, text) of one request, sent in one of several ways."""
    way = chance.random()
    if way < 0.15:
        # Gives up at any moment: while the request waits, is read in, or is answered.
        with suppress(asyncio.TimeoutError):
            post = client.post("/v1/chat/completions", json=asked.body)
            await asyncio.wait_for(post, chance.random())
        return "given up", ""
    if way < 0.4:
        response = await client.post("/v1/chat/completions", json=asked.body)
        if response.status_code != 200:
            return refusal(response), ""
        return "whole", response.json()["choices"][0]["message"]["content"]
    text, n_max = "", chance.randrange(1, 6) if way < 0.7 else None
    body = {**asked.body, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return refusal(response), ""
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "stream", text
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"broken: {event['error']['message']}", text
                text += event["choices"][0]["delta"].get("content", "")
                n_max = None if n_max is None else n_max - 1
                if n_max == 0:
                    return "left", text
    return "ended early", text


def refusal(response: httpx.Response) -> str:
    """The status; a client that is told to wait must be told for how long."""
    has_time = response.headers.get("retry-after", "").isdigit()
    return f"{response.status_code}" if has_time else f"{response.status_code} without a time"


async def one_client(
    server: Running, asked: list[Question], number: int, until_s: float, outcome: Outcome
) -> None:
    chance = random.Random(number)
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
        while time.monotonic() < until_s:
            question = chance.choice(asked)
            kind, text = await ask(client, question, chance)
            outcome.counts[kind] += 1
            if kind == "429":
                await asyncio.sleep(chance.random())
            is_right = text == question.expected
            if kind == "left":
                is_right = question.expected.startswith(text)
            if kind in ("whole", "stream", "left") and not is_right:
                outcome.wrong.append(f"{text!r:.60} for {question.expected!r:.60}")


async def all_clients(server: Running, asked: list[Question], seconds: float) -> Outcome:
    outcome = Outcome()
    until_s = time.monotonic() + seconds
    clients = [
        asyncio.create_task(one_client(server, asked, i, until_s, outcome))
        for i in range(N_CLIENTS)
    ]
    while not all(client.done() for client in clients):
        outcome.rss_bytes.append(psutil.Process().memory_info().rss)
        await asyncio.wait(clients, timeout=1.0)
    for client in clients:
        client.result()
    return outcome


def load(folder: Path, seconds: float) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a run on a tiny pair, and the server's statistics after it."""
    spec = TargetSpec(layer_gain=0.05)
    model = write_llama(folder / "pair.gguf", spec)
    write_drafter(folder / "dspark-pair.gguf", DrafterSpec(target=spec, mimic=True))
    options = EngineOptions(
        n_ctx=512, n_seq=4, n_threads=1, speculation="always", cost_cache=folder
    )
    settings = tiny_settings(model, engine=options, max_queue=44)
    with running(settings) as server:
        # A near tie goes either way with the width of the passes, which others decide.
        asked = [each for each in questions(server) if each.margin > NOISE]
        assert len(asked) > N_QUESTIONS / 2, "too many near ties: little is compared"
        outcome = asyncio.run(all_clients(server, asked, seconds))
        while server.hub.n_requests:
            time.sleep(0.05)
        stats = server.get("/stats").json()
        again = {str(each.body): each for each in questions(server)}
        for then in asked:  # what went on has left no trace
            now = again[str(then.body)]
            if now.expected != then.expected:
                outcome.wrong.append(
                    f"afterwards {now.expected!r} for {then.expected!r}, "
                    f"margins {now.margin} and {then.margin}"
                )
        return outcome, stats


def check(outcome: Outcome, stats: dict[str, Any]) -> None:
    assert not outcome.wrong, outcome.wrong[:3]
    assert set(outcome.counts) <= {"whole", "stream", "left", "given up", "429"}, outcome.counts
    assert set(stats["requests"]) <= {"ok", "cancelled", "429"}, stats["requests"]
    assert stats["requests"]["ok"] >= outcome.counts["whole"] + outcome.counts["stream"]
    assert outcome.counts["429"], "64 clients and room for 48: some must be told to wait"
    assert min(outcome.counts[kind] for kind in ("whole", "stream", "left")) > 0
    assert stats["queue"] == {"n_requests": 0, "n_waiting": 0}
    assert stats["n_accepted"] > 0
    third = len(outcome.rss_bytes) // 3
    settled, later = outcome.rss_bytes[third : 2 * third], outcome.rss_bytes[2 * third :]
    assert max(later) < max(settled) * (1 + MAX_GROWTH), outcome.rss_bytes


def test_every_request_under_load_ends_as_it_should(tmp_path: Path) -> None:
    check(*load(tmp_path, CI_SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Load test of the server on a tiny pair.")
    parser.add_argument("--seconds", type=float, default=180.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome, stats = load(Path(folder), args.seconds)
    print(dict(outcome.counts), f"tau {stats['tau']}, memory {outcome.rss_bytes[::20]}")
    check(outcome, stats)


if __name__ == "__main__":
    main()
