"""Which of the sampled text is for judging only: all replies to some of the prompts.

By prompt, since replies to one prompt are alike. Refuses to know the drafter.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from .shards import Sampled, ShardStore, Text

EVERY = 24  # prompts, on average: one is held out, up to ...
N_JUDGED = 32  # ... so many


@dataclass(slots=True, frozen=True)
class HeldOut:
    """One reply to each prompt that is held out."""

    replies: list[Sampled]
    prompts: frozenset[bytes]

    def has(self, sampled: Sampled | Text) -> bool:
        """Whether a reply is not to be trained on, nor to be looked up in."""
        return _prompt_of(sampled) in self.prompts


def hold_out(store: ShardStore) -> HeldOut:
    """The same ones in each run. Where chance picks none, the first prompt of the store."""
    kept: dict[bytes, Sampled] = {}
    for shard in store.shards:
        for sampled in store.read(shard):
            prompt = _prompt_of(sampled)
            if zlib.crc32(prompt) % EVERY == 0:
                kept.setdefault(prompt, sampled)
        if len(kept) >= N_JUDGED:
            break
    if not kept and store.shards:
        first = store.read(store.shards[0])[0]
        kept[_prompt_of(first)] = first
    prompts = list(kept)[:N_JUDGED]
    return HeldOut([kept[prompt] for prompt in prompts], frozenset(prompts))


def _prompt_of(sampled: Sampled | Text) -> bytes:
    return sampled.tokens[: sampled.n_prompt].tobytes()
