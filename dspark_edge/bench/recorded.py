"""Recorded texts: what was emitted, and at every position what was proposed and how much was right.

The emitted text does not depend on drafts, so one recording with a block at
every position tells exactly what any policy would have gained on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..signals import DraftSignals
from ..trace import Trace, TraceBlock, TraceSequence

HOW_TO_RECORD = 'record with speculation="always", verify_len=0'


@dataclass(slots=True, frozen=True)
class Proposal:
    """One block. n_correct: its first tokens that the text agrees with."""

    proposer: str
    signals: DraftSignals
    n_correct: int


@dataclass(slots=True)
class Text:
    """One request's reply. start: absolute position of tokens[0]; proposals: of each token."""

    start: int
    tokens: list[int] = field(default_factory=list)
    proposals: list[list[Proposal]] = field(default_factory=list)


def texts_of(trace: Trace) -> list[Text]:
    """The replies of a trace, in the order in which they began.

    A block is cut so that it and the bonus token stay inside the text. Raises ValueError when
    rounds emitted more than one token (positions without blocks) or a request has a gap.
    """
    sequences: dict[int, list[TraceSequence]] = {}
    for line in trace.rounds:
        for sequence in line.sequences:
            if len(sequence.emitted) > 1:
                raise ValueError(
                    f"round {line.round} emitted {len(sequence.emitted)} tokens, so some positions "
                    f"have no block; {HOW_TO_RECORD}"
                )
            if sequence.emitted:
                sequences.setdefault(sequence.request, []).append(sequence)
    texts = [_text(request, rounds) for request, rounds in sequences.items()]
    if not any(proposals for text in texts for proposals in text.proposals):
        raise ValueError(f"the trace holds no blocks; {HOW_TO_RECORD}")
    return texts


def _text(request: int, rounds: Sequence[TraceSequence]) -> Text:
    text = Text(start=rounds[0].position, tokens=[s.emitted[0] for s in rounds])
    for i, sequence in enumerate(rounds):
        if sequence.position != text.start + i:
            raise ValueError(
                f"request {request} jumps to position {sequence.position} "
                f"where {text.start + i} follows; {HOW_TO_RECORD}"
            )
        proposals = [_proposal(block, text.tokens[i:]) for block in sequence.blocks]
        text.proposals.append([p for p in proposals if p.signals.tokens])
    return text


def _proposal(block: TraceBlock, ahead: Sequence[int]) -> Proposal:
    """ahead: the text from the block's first token on; its last token can only be a bonus."""
    n = min(len(block.tokens), len(ahead) - 1)
    signals = DraftSignals(
        tokens=block.tokens[:n],
        confidence=block.confidence[:n] if block.confidence else None,
        certainty=block.certainty[:n],
        match_len=block.match_len,
        is_cached=block.is_cached,
        cache_agreement=block.cache_agreement[:n],
        cache_count=block.cache_count[:n],
    )
    n_correct = 0
    while n_correct < n and signals.tokens[n_correct] == ahead[n_correct]:
        n_correct += 1
    return Proposal(proposer=block.proposer, signals=signals, n_correct=n_correct)
