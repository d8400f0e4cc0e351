"""Which of the sampled replies the drafter's lookup cache is made of.

Refuses to know the file that they go into.
"""

from __future__ import annotations

from .held_out import HeldOut
from .shards import Ints, ShardStore

LOOKUP_TOKENS = 400_000
CONTEXT_TOKENS = 6  # of the prompt, in front of each reply: its first tokens are looked up by them


def known_replies(
    store: ShardStore, held_out: HeldOut, *, n_max: int = LOOKUP_TOKENS
) -> list[Ints]:
    """Whole replies behind the end of their prompts, n_max tokens together at most: those of the
    lowest temperature first, then by number. Each text once, and none that is held out."""
    texts = [text for shard in store.shards for text in store.read_texts(shard)]
    known: dict[bytes, Ints] = {}
    n_tokens = 0
    for text in sorted(texts, key=lambda each: (each.temperature, each.number)):
        reply = text.tokens[max(0, text.n_prompt - CONTEXT_TOKENS) :]
        if len(text.tokens) == text.n_prompt or held_out.has(text) or reply.tobytes() in known:
            continue
        n_tokens += len(reply)
        if n_tokens > n_max:
            break
        known[reply.tobytes()] = reply
    return list(known.values())
