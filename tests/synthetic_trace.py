"""Made-up recordings: blocks at every position, with confidences that are informative but too sure.

Text tokens have a difficulty that drifts; spans are copied, and prompt lookup knows them.
"""

from __future__ import annotations

import math
import random

from dspark_edge.trace import Trace, TraceBlock, TraceHeader, TraceRound, TraceSequence

WRONG = 1_000_000  # added to a token id: in no text


def header(block: int = 7, mode: str = "always") -> TraceHeader:
    return TraceHeader(
        target="made up", drafter="made up", n_ctx=4096, n_seq=1, block=block, mode=mode
    )


def one_round(n: int, position: int, emitted: list[int], blocks: list[TraceBlock]) -> TraceRound:
    """A round of a recording: nothing verified, one token emitted."""
    sequence = TraceSequence(request=0, position=position, emitted=emitted, blocks=blocks)
    return TraceRound(
        round=n,
        t_s=0.01 * n,
        depth=position - 1,
        state="always on",
        batch_tokens=1,
        verify_s=0.009,
        own_s=0.0003,
        draft_s=0.003,
        sequences=[sequence],
    )


def recording(
    *,
    n_texts: int = 3,
    n_tokens: int = 300,
    block: int = 7,
    quality: float = 1.5,
    lookup: bool = True,
    exact: bool = False,
    seed: int = 0,
) -> Trace:
    """quality: logit of the first draft token's chance at a text token of middling difficulty.

    exact: confidences are the true chances; else they are noisy and too sure.
    """
    rng = random.Random(seed)
    rounds: list[TraceRound] = []
    for request in range(n_texts):
        text = [rng.randrange(1000) for _ in range(n_tokens)]
        ease, luck, copied = _course(rng, n_tokens, quality)
        for at in range(n_tokens):
            blocks = [_drafted(rng, text, at, block, ease, luck)]
            if exact:
                blocks[0].confidence = [_chance(ease, at, k) for k in range(block)]
            if lookup:
                blocks += _looked_up(rng, text, at, block, copied)
            line = one_round(len(rounds), 50 + at, [text[at]], blocks)
            line.sequences[0].request = request
            rounds.append(line)
    return Trace(header=header(block), rounds=rounds, events=[])


def _course(
    rng: random.Random, n_tokens: int, quality: float
) -> tuple[list[float], list[float], list[int]]:
    """Per text token: ease (a logit), luck (uniform), and how far into a copied span it is."""
    ease, luck, copied = [], [], []
    drift, span = 0.0, 0
    for _ in range(n_tokens):
        drift = 0.85 * drift + rng.gauss(0.0, 0.9)
        span = span + 1 if rng.random() < (0.9 if span else 0.04) else 0
        ease.append(quality + drift)
        luck.append(rng.random())
        copied.append(span)
    return ease, luck, copied


def _drafted(
    rng: random.Random,
    text: list[int],
    at: int,
    block: int,
    ease: list[float],
    luck: list[float],
) -> TraceBlock:
    result = TraceBlock(proposer="drafter", tokens=[], confidence=[])
    confidence: list[float] = []
    for k in range(block):
        place = min(at + k, len(text) - 1)
        chance = _chance(ease, at, k)
        logit = math.log(chance / (1.0 - chance))
        right = luck[place] < chance and place == at + k
        result.tokens.append(text[place] + (0 if right else WRONG))
        confidence.append(_sigmoid(1.3 * logit + rng.gauss(0.0, 0.5)))
        result.certainty.append(max(0.0, logit + rng.gauss(0.0, 0.7)))
    result.confidence = confidence
    return result


def _looked_up(
    rng: random.Random, text: list[int], at: int, block: int, copied: list[int]
) -> list[TraceBlock]:
    """A match within a copied span, a false one now and then, else none."""
    span = copied[at]
    if not span and rng.random() < 0.8:
        return []
    match_len = min(span + 1, 16) if span else 2
    tokens = []
    for k in range(block):
        place = min(at + k, len(text) - 1)
        right = span > 0 and place == at + k and copied[place] == span + k
        tokens.append(text[place] + (0 if right else WRONG))
    return [TraceBlock(proposer="lookup", tokens=tokens, match_len=match_len)]


def _chance(ease: list[float], at: int, k: int) -> float:
    """That draft token k at `at` is right, when those before were."""
    return _sigmoid(ease[min(at + k, len(ease) - 1)] - 0.2 * k)


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))
