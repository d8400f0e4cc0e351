"""Runs one group of requests side by side on an engine, and measures it.

The clock of decoding starts when each request has its first token, so that no prompt is evaluated
while it runs, and stops when one ends: after that fewer run side by side than were asked for, and
the sooner the faster the others were. Refuses to know modes, repeats and prompts' names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..engine import Engine
from ..errors import DecodeError
from ..sequence import Chunk, SamplingParams, Stats
from .energy import EnergyMeter


@dataclass(slots=True)
class Round:
    """One clocked round. batch_tokens: anchors and draft tokens in the target's pass."""

    batch_tokens: int
    n_tokens: int  # emitted
    seconds: float


@dataclass(slots=True)
class GroupRun:
    """What one group has given. positions: [n_right, n_judged] by draft position."""

    replies: list[list[int]]  # token ids
    stats: list[Stats]
    rounds: list[Round] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    joules: float | None = None  # while the clock ran

    @property
    def n_tokens(self) -> int:
        """Emitted while the clock ran."""
        return sum(each.n_tokens for each in self.rounds)

    @property
    def seconds(self) -> float:
        """Wall time of the rounds while the clock ran."""
        return sum(each.seconds for each in self.rounds)


def run_group(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    meter: EnergyMeter | None = None,
) -> GroupRun:
    """Runs the requests to their ends, all at once. Raises DecodeError when one fails."""
    _forget_prefixes(engine, len(prompts))
    place = {engine.add(p, how): i for i, (p, how) in enumerate(zip(prompts, params, strict=True))}
    run = GroupRun([[] for _ in prompts], [Stats() for _ in prompts])
    n_verified = [0] * len(prompts)
    without_token = set(place)
    has_ended = False
    joules = None
    while not engine.is_idle:
        is_clocked = not without_token and not has_ended
        if is_clocked and joules is None and meter is not None:
            joules = meter.joules()
        start = time.perf_counter()
        chunks = engine.step()
        seconds = time.perf_counter() - start
        this = Round(0, 0, seconds)
        for chunk in chunks:
            index = place[chunk.request_id]
            without_token.discard(chunk.request_id)
            has_ended = has_ended or chunk.finish_reason is not None
            n_drafted = _take(run, index, chunk, n_verified[index])
            n_verified[index] += n_drafted
            this.batch_tokens += 1 + n_drafted
            this.n_tokens += len(chunk.token_ids)
        if is_clocked:
            run.rounds.append(this)
            if has_ended and joules is not None and meter is not None:
                run.joules = meter.joules() - joules
    return run


def draw_lead(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, reply: Sequence[int]
) -> float:
    """Lead in logits of the token after these, drawn again: noise belongs to positions."""
    again = engine.generate([*prompt, *reply], replace(params, max_tokens=1))
    return list(again)[-1].stats.min_margin


def _take(run: GroupRun, index: int, chunk: Chunk, n_verified: int) -> int:
    """Books a chunk; returns how many draft tokens its round verified for this request."""
    if chunk.finish_reason == "error":
        raise DecodeError(f"a request failed while it was measured: {chunk.error}")
    run.stats[index] = chunk.stats
    run.replies[index] += chunk.token_ids
    n_drafted = chunk.stats.n_verified - n_verified
    # Without a bonus token the reply ended within the accepted run: the next was never judged.
    was_cut = len(chunk.token_ids) == chunk.n_accepted
    n_judged = chunk.n_accepted if was_cut else min(chunk.n_accepted + 1, n_drafted)
    while len(run.positions) < n_drafted:
        run.positions.append([0, 0])
    for position in range(n_judged):
        run.positions[position][0] += position < chunk.n_accepted
        run.positions[position][1] += 1
    return n_drafted


def _forget_prefixes(engine: Engine, n_seq: int) -> None:
    """Takes earlier prompts out of every cache, so that a repeat evaluates its prompt again."""
    token = engine.tokenize("x", add_special=False)[:1]
    for _ in range(n_seq):
        engine.add(token, SamplingParams(max_tokens=1, temperature=0.0))
    while not engine.is_idle:
        engine.step()
