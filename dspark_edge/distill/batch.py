"""A sampled sequence as tensors: every token of the reply is an anchor, the target's distribution
is computed once and shared by all of them.

Owns the arithmetic of anchors and slots. Refuses to know the drafter's weights and losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .shards import Sampled

N_CERTAIN = 6  # likeliest tokens of each position that are always in the softmax


class DraftVocabulary:
    """The draft tokens: ids [n_draft] in rising order, and the column of each token, or -1."""

    def __init__(self, ids: Tensor, n_vocab: int) -> None:
        self.ids = ids
        self.columns = torch.full((n_vocab,), -1, dtype=torch.int64, device=ids.device)
        self.columns[ids] = torch.arange(len(ids), device=ids.device)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Candidates:
    """Draft columns [n] that one sequence's softmax is taken over. log_weight [n]: of a random
    column the logarithm of how many it stands for, else 0; the first n_certain are not random."""

    columns: Tensor
    log_weight: Tensor
    n_certain: int


@dataclass(slots=True)
class Anchors:
    """The blocks of one sequence. tokens [n] at positions [n]. For slot k of a block: row [n, size]
    is the reply token that it is about, previous [n, size] the token in front of that, is_valid
    [n, size] whether the reply reaches so far (else row and previous point to its last)."""

    tokens: Tensor
    positions: Tensor
    row: Tensor
    previous: Tensor
    is_valid: Tensor


@dataclass(slots=True)
class Sequence:
    """One sampled sequence on the device; features and hidden as float32."""

    tokens: Tensor
    n_prompt: int
    features: Tensor
    hidden: Tensor
    log_sum_exp: Tensor
    likely: Tensor

    @property
    def n_reply(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens) - self.n_prompt


def to_device(sampled: Sampled, device: torch.device) -> Sequence:
    """The arrays as tensors."""

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Sequence(
        tokens=tensor(sampled.tokens).long(),
        n_prompt=sampled.n_prompt,
        features=tensor(sampled.features).float(),
        hidden=tensor(sampled.hidden).float(),
        log_sum_exp=tensor(sampled.log_sum_exp),
        likely=tensor(sampled.likely).long(),
    )


def anchors_of(sequence: Sequence, block_size: int) -> Anchors:
    """All anchors: the prompt's last token and every token of the reply but its last.

    Anchor i stands at position n_prompt - 1 + i, in front of reply token i; its slot k is about
    reply token i + k.
    """
    device = sequence.tokens.device
    first = torch.arange(sequence.n_reply, device=device)
    row = first[:, None] + torch.arange(block_size, device=device)
    is_valid = row < sequence.n_reply
    row = row.clamp(max=sequence.n_reply - 1)
    positions = sequence.n_prompt - 1 + first
    previous = sequence.tokens[sequence.n_prompt - 1 + row]
    return Anchors(sequence.tokens[positions], positions, row, previous, is_valid)


def choose_candidates(
    sequence: Sequence, vocabulary: DraftVocabulary, *, n_random: int, n_exact: int
) -> Candidates:
    """What is likely somewhere in the sequence, what it says, and n_random others that stand for
    the rest; all columns where those are n_exact at most."""
    device = sequence.tokens.device
    n = len(vocabulary)
    if n <= n_exact:
        return Candidates(torch.arange(n, device=device), torch.zeros(n, device=device), n)
    said = sequence.tokens[sequence.n_prompt :]
    wanted = torch.cat([said, sequence.likely[:, :N_CERTAIN].reshape(-1)])
    columns = vocabulary.columns[wanted]
    is_certain = torch.zeros(n, dtype=torch.bool, device=device)
    is_certain[columns[columns >= 0]] = True
    certain = is_certain.nonzero().squeeze(1)
    others = (~is_certain).nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others), device=device)[:n_random]]
    log_weight = torch.zeros(len(certain) + len(drawn), device=device)
    if len(drawn) > 0:
        log_weight[len(certain) :] = math.log(len(others) / len(drawn))
    return Candidates(torch.cat([certain, drawn]), log_weight, len(certain))
