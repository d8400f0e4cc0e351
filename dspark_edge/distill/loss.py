"""What a drafter is judged by: cross-entropy, total variation, and what its confidence should be.

Distributions are taken over a sequence's candidates. Refuses to know optimisers and files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .batch import Anchors, Candidates, DraftVocabulary, Sequence, anchors_of, choose_candidates
from .model import Drafter
from .settings import TrainSettings


@dataclass(slots=True, frozen=True)
class Weights:
    """Of cross-entropy and of total variation in the loss."""

    cross_entropy: float
    total_variation: float


@dataclass(slots=True)
class Losses:
    """Means over the valid slots of a sequence, weighted by slot; total is what is minimised."""

    total: Tensor
    cross_entropy: float
    total_variation: float
    confidence: float
    n_anchors: int


def weights_at(progress: float) -> Weights:
    """Cross-entropy first: total variation alone learns slowly while draft and target are far
    apart. It blends in over the second half, up to 0.9."""
    blend = min(1.0, max(0.0, 2.0 * progress - 1.0))
    return Weights(1.0 - 0.9 * blend, 0.9 * blend)


def target_probabilities(drafter: Drafter, sequence: Sequence, candidates: Candidates) -> Tensor:
    """[n_reply, n_candidates]: exact for each candidate; what other tokens have is left out."""
    logits = sequence.hidden @ drafter.head[candidates.columns].float().T
    return (logits - sequence.log_sum_exp[:, None]).exp()


def draft_logits(drafter: Drafter, hidden: Tensor, markov_rows: Tensor, columns: Tensor) -> Tensor:
    """[..., n_columns] from hidden [..., n_embd] and W1 rows [..., rank] of what stands before."""
    base = hidden @ drafter.head[columns].float().T
    return base + markov_rows @ drafter.markov_w2[columns].T


def losses(
    drafter: Drafter,
    sequence: Sequence,
    vocabulary: DraftVocabulary,
    *,
    weights: Weights,
    settings: TrainSettings,
) -> Losses:
    """Of all blocks of a sequence, each slot given the tokens that stand before it."""
    candidates = choose_candidates(
        sequence, vocabulary, n_random=settings.n_random, n_exact=settings.n_exact
    )
    anchors = anchors_of(sequence, drafter.shape.block_size)
    with torch.no_grad():
        p = target_probabilities(drafter, sequence, candidates)
    hidden = drafter.hidden(drafter.context(sequence.features), anchors.tokens, anchors.positions)
    rows = drafter.markov_rows(anchors.previous)
    logits = draft_logits(drafter, hidden, rows, candidates.columns)
    # A sum over the vocabulary is one over the candidates, each as often as it stands for: so both
    # distributions are those of what a candidate stands for, as a whole.
    log_q = (logits + candidates.log_weight).log_softmax(-1)
    p = p * candidates.log_weight.exp()
    p_of_slot = p[anchors.row]
    shift = (p * candidates.log_weight).sum(-1)[anchors.row]
    cross_entropy = shift - (p_of_slot * log_q).sum(-1)
    # What the target may say beyond the draft vocabulary is lost in any case.
    overlap = torch.minimum(p_of_slot, log_q.exp()).sum(-1)
    confidence = functional.binary_cross_entropy_with_logits(
        drafter.confidence_logit(hidden, rows), overlap.detach().clamp(0.0, 1.0), reduction="none"
    )
    share = _slot_weights(anchors, settings.slot_decay)
    ce, tv, bce = ((each * share).sum() for each in (cross_entropy, 1.0 - overlap, confidence))
    total = weights.cross_entropy * ce + weights.total_variation * tv
    total = total + settings.confidence_weight * bce
    return Losses(total, float(ce.detach()), float(tv.detach()), float(bce.detach()), len(p))


def _slot_weights(anchors: Anchors, decay: float) -> Tensor:
    """[n, size], sum 1: later slots weigh less, since fewer rounds get to them."""
    slots = torch.arange(anchors.row.shape[1], device=anchors.row.device)
    weight = anchors.is_valid * decay ** slots.float()
    return weight / weight.sum()
