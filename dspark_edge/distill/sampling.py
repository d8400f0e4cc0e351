"""Many sequences side by side on one decoder: prompts in, the target's replies out.

Reads what the target saw in the same passes. Refuses to know where prompts come from and where
replies go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .._core import BlockDecoder, SamplingConfig

N_LIKELY = 8
HALF_MAX = 65504.0

Half = npt.NDArray[np.float16]


@dataclass(slots=True)
class Job:
    """A reply to be sampled. number: its name and its seed. is_tapped: whether what the target
    sees is kept."""

    number: int
    prompt: list[int]
    temperature: float
    max_tokens: int
    is_tapped: bool = True


@dataclass(slots=True)
class Reply:
    """What came: tokens [n]; when tapped, features [n_prompt + n - 1, n_feature], hidden [n,
    n_embd]; log_probs [n] of the tokens and likely [n, N_LIKELY] token ids, before temperature."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    features: list[Half] = field(default_factory=list)
    hidden: list[Half] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    likely: list[list[int]] = field(default_factory=list)


def sample(
    decoder: BlockDecoder, jobs: Iterable[Job], *, is_over: Callable[[], bool] = lambda: False
) -> Iterator[Reply]:
    """Replies as they end: by an end token, their length, or a full context. The next job is asked
    for when there is room for it, after the replies before it were given. is_over: asked after each
    round; then all tapped replies end as they are, and those that are not tapped are dropped.

    A prompt must be shorter than the context. Raises DecodeError.
    """
    ends = frozenset(decoder.eog_tokens)
    waiting = iter(jobs)
    running: dict[int, Reply] = {}
    try:
        while True:
            for seq_id in range(decoder.n_seq):
                if seq_id not in running and (job := next(waiting, None)) is not None:
                    running[seq_id] = _begin(decoder, seq_id, job)
            if not running:
                return
            running = dict(sorted(running.items()))  # cells of their own ask for rising order
            _round(decoder, running)
            if is_over():
                yield from (reply for reply in running.values() if reply.job.is_tapped)
                return
            for seq_id, reply in list(running.items()):
                n_past = len(reply.job.prompt) + len(reply.tokens)
                is_long = len(reply.tokens) >= reply.job.max_tokens or n_past >= decoder.n_ctx
                if is_long or reply.tokens[-1] in ends:
                    del running[seq_id]
                    decoder.close_sequence(seq_id)
                    yield reply
    finally:
        for seq_id in running:
            decoder.close_sequence(seq_id)


def _begin(decoder: BlockDecoder, seq_id: int, job: Job) -> Reply:
    config = SamplingConfig(
        temperature=job.temperature,
        seed=job.number,
        n_logprobs=N_LIKELY if job.is_tapped else -1,
    )
    decoder.open_sequence(seq_id, config)
    reply = Reply(job)
    before = job.prompt[:-1]  # the last token is the first anchor
    for begin in range(0, len(before), decoder.n_batch):
        decoder.prefill(seq_id, before[begin : begin + decoder.n_batch])
        if job.is_tapped:
            reply.features.append(as_half(decoder.tapped_rows()[0]))
    return reply


def _round(decoder: BlockDecoder, running: dict[int, Reply]) -> None:
    anchors = [[(each.tokens or each.job.prompt)[-1]] for each in running.values()]
    verdicts = decoder.verify(list(running), anchors)
    if any(reply.job.is_tapped for reply in running.values()):
        features, hidden = (as_half(rows) for rows in decoder.tapped_rows())
    for row, (reply, verdict) in enumerate(zip(running.values(), verdicts, strict=True)):
        reply.tokens.append(verdict.tokens[0])
        if reply.job.is_tapped:
            reply.features.append(features[row : row + 1])
            reply.hidden.append(hidden[row : row + 1])
            (_, log_prob), *likely = verdict.logprobs[0]
            reply.log_probs.append(log_prob)
            reply.likely.append([token for token, _ in likely])


def as_half(rows: npt.NDArray[np.float32]) -> Half:
    """Rounded to float16; the few dimensions that would not fit are cut."""
    return np.clip(rows, -HALF_MAX, HALF_MAX).astype(np.float16)
