"""A new drafter from a target and its sampled text: frozen parts, features' scale, vocabulary.

Refuses to know the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import psutil
import torch

from ..errors import MemoryPlanError
from .batch import DraftVocabulary
from .model import Drafter
from .settings import Shape
from .shards import Sampled, ShardStore
from .start import StartFile
from .target_file import TargetFile
from .vocabulary import choose_tokens

N_SCALED = 64  # sequences that features' scale is taken from
ROWS_AT_ONCE = 8192
BYTES_PER_WEIGHT = 16  # weight, gradient, and the optimiser's two
WORKING_BYTES = 1 << 30  # shards, and what PyTorch itself takes
SLOT_FLOATS = 12000  # kept of each slot for its gradient: over some 1500 candidates, and ...
SLOT_FLOATS_PER_EMBD, SLOT_FLOATS_PER_FF = 12, 4  # ... in each layer
RMS_MIN = 1e-3  # of a dimension against the mean one: a silent one is not blown up


def check_memory(shape: Shape, n_draft_max: int, n_slots: int) -> None:
    """n_slots: of all sequences that are learnt from at once.

    Raises MemoryPlanError when training would not fit beside what runs now.
    """
    n_draft = min(n_draft_max, shape.n_vocab)
    heads = (shape.n_head + shape.n_head_kv) * shape.head_dim
    layer = shape.n_embd * (2 * heads + 3 * shape.n_ff)
    n_trained = shape.n_embd * shape.n_feature + shape.n_layer * layer
    n_trained += shape.rank * (shape.n_embd + n_draft)
    frozen = 2 * shape.n_vocab * shape.n_embd + 4 * n_draft * shape.n_embd
    kept = SLOT_FLOATS_PER_EMBD * shape.n_embd + SLOT_FLOATS_PER_FF * shape.n_ff
    needed = frozen + BYTES_PER_WEIGHT * n_trained + WORKING_BYTES
    needed += 4 * n_slots * (SLOT_FLOATS + shape.n_layer * kept)
    available = psutil.virtual_memory().available
    if needed > available:
        raise MemoryPlanError(
            f"training needs about {needed >> 20} MB of memory but {available >> 20} MB are free; "
            "close other programs, or give fewer --layers or --threads"
        )


def all_sequences(store: ShardStore) -> Iterator[Sampled]:
    """One shard in memory at a time."""
    for shard in store.shards:
        yield from store.read(shard)


def new_drafter(
    target: TargetFile,
    shape: Shape,
    store: ShardStore,
    *,
    n_draft_max: int,
    device: torch.device,
    seed: int,
    start: StartFile | None = None,
) -> tuple[Drafter, DraftVocabulary, float]:
    """The drafter at its start, its vocabulary, and the share of the text that this covers.

    start: a drafter of this shape that it goes on from.
    """
    ids, covered = choose_tokens(
        all_sequences(store),
        n_vocab=shape.n_vocab,
        n_max=n_draft_max,
        known=None if start is None else start.draft_ids,
    )
    torch.manual_seed(seed)
    drafter = Drafter(
        shape,
        embedding_of(target),
        torch.from_numpy(target.head_rows(ids)),
        torch.from_numpy(_feature_rms(store, shape)),
    )
    if start is not None:
        start.fill(drafter, ids)
    vocabulary = DraftVocabulary(torch.from_numpy(ids).to(device), shape.n_vocab)
    return drafter.to(device), vocabulary, covered


def embedding_of(target: TargetFile) -> torch.Tensor:
    """[n_vocab, n_embd] as float16: half the memory, and it is read row by row."""
    rows = torch.empty(target.n_vocab, target.n_embd, dtype=torch.float16)
    for begin in range(0, target.n_vocab, ROWS_AT_ONCE):
        part = slice(begin, min(begin + ROWS_AT_ONCE, target.n_vocab))
        rows[part] = torch.from_numpy(target.embedding_rows(part)).half()
    return rows


def _feature_rms(store: ShardStore, shape: Shape) -> npt.NDArray[np.float32]:
    total = np.zeros(shape.n_feature)
    n_rows = 0
    for count, sampled in enumerate(all_sequences(store)):
        if count == N_SCALED:
            break
        total += np.square(sampled.features.astype(np.float64)).sum(axis=0)
        n_rows += len(sampled.features)
    rms = np.sqrt(total / max(1, n_rows))
    return np.asarray(np.maximum(rms, RMS_MIN * rms.mean() + 1e-12), dtype=np.float32)
