"""The reduced draft vocabulary: the tokens that the target says, by how often it says them.

Refuses to know the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .shards import Sampled

Ids = npt.NDArray[np.int64]
COVERED = 0.99  # of what the target says; each further row costs time in every draft
LIKELY_WEIGHT = 0.05  # of a token that was likely but not said, against one that was
SMALLEST = 1024


def choose_tokens(
    sequences: Iterable[Sampled], *, n_vocab: int, n_max: int, known: Ids | None = None
) -> tuple[Ids, float]:
    """Ids in rising order, and the share of the replies' tokens that they are.

    The whole vocabulary where it is not larger than n_max. known: ids that a drafter already has;
    those that the text has no use for are kept as far as there is room.
    """
    said = np.zeros(n_vocab)
    likely = np.zeros(n_vocab)
    for each in sequences:
        np.add.at(said, each.tokens[each.n_prompt :], 1.0)
        np.add.at(likely, each.likely.ravel(), LIKELY_WEIGHT)
    if n_vocab <= n_max:
        return np.arange(n_vocab), 1.0
    order = np.argsort(-(said + likely), kind="stable")
    covered = np.cumsum(said[order]) / max(1.0, said.sum())
    n = int(np.searchsorted(covered, COVERED)) + 1
    n = min(n_max, max(SMALLEST, -(-n // 256) * 256))
    if known is not None:
        kept = order[n:][np.isin(order[n:], known)][: n_max - n]
        ids = np.concatenate([order[:n], kept])
        return np.sort(ids), float(said[ids].sum() / max(1.0, said.sum()))
    return np.sort(order[:n]), float(covered[n - 1])
