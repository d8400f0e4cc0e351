"""How far a drafter's blocks would get on sequences that it was not trained on.

Refuses to know decoding: real rounds are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .batch import DraftVocabulary, Sequence, anchors_of
from .loss import draft_logits
from .model import Drafter

MAX_ROWS = 256  # anchors whose whole softmax is in memory at once


@dataclass(slots=True)
class Acceptance:
    """Per slot, given that all earlier ones were accepted: `greedy`, that draft and target have the
    same likeliest token; `sampled`, the overlap of their distributions (temperature 1, the bound of
    any sampling). tau: tokens a round gains on average, bonus included."""

    greedy: list[float]
    sampled: list[float]
    greedy_tau: float
    sampled_tau: float
    n_anchors: int


@torch.no_grad()
def evaluate(
    drafter: Drafter, sequences: Iterable[Sequence], vocabulary: DraftVocabulary
) -> Acceptance:
    """Over all anchors of the sequences. A block that the reply's end cuts counts as far as it
    goes. Raises ValueError without sequences."""
    size = drafter.shape.block_size
    reached = torch.zeros(2, size, dtype=torch.float64)  # weight that got to a slot ...
    passed = torch.zeros(2, size, dtype=torch.float64)  # ... and past it
    n_anchors = 0
    for sequence in sequences:
        context = drafter.context(sequence.features)
        anchors = anchors_of(sequence, size)
        n_anchors += len(anchors.tokens)
        for begin in range(0, len(anchors.tokens), MAX_ROWS):
            part = slice(begin, begin + MAX_ROWS)
            hidden = drafter.hidden(context, anchors.tokens[part], anchors.positions[part])
            rows = drafter.markov_rows(anchors.previous[part])
            agree = _agreements(drafter, sequence, vocabulary, hidden, rows, anchors.row[part])
            survival = torch.ones(2, len(hidden), device=hidden.device)
            for slot in range(size):
                survival = survival * anchors.is_valid[part, slot]
                reached[:, slot] += survival.sum(-1).cpu()
                survival = survival * agree[:, :, slot]
                passed[:, slot] += survival.sum(-1).cpu()
    if n_anchors == 0:
        raise ValueError("there is no sequence to evaluate a drafter on; sample more")
    rate = passed / reached.clamp(min=1e-9)
    tau = 1.0 + passed.sum(1) / n_anchors
    return Acceptance(rate[0].tolist(), rate[1].tolist(), float(tau[0]), float(tau[1]), n_anchors)


def _agreements(
    drafter: Drafter,
    sequence: Sequence,
    vocabulary: DraftVocabulary,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    target_rows: torch.Tensor,
) -> torch.Tensor:
    """[2, n, size]: greedy agreement as 0 or 1, and overlap of the distributions."""
    columns = torch.arange(len(vocabulary), device=hidden.device)
    logits = draft_logits(drafter, hidden, rows, columns)
    likeliest = vocabulary.ids[logits.argmax(-1)]
    greedy = (likeliest == sequence.likely[target_rows, 0]).float()
    target_logits = sequence.hidden @ drafter.head.float().T - sequence.log_sum_exp[:, None]
    overlap = torch.minimum(logits.softmax(-1), target_logits.exp()[target_rows]).sum(-1)
    return torch.stack([greedy, overlap])
