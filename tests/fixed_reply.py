"""A tiny llama that says one text, whatever is asked, with a thought before it.

Each token follows from the one before it alone, so none may occur twice in the two texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from tiny_models import SPECIAL, TargetSpec, token_id, vocabulary, write_llama

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
N_EMBD = 384  # at least one for each token, and divisible by the heads
RENAMED = {"<|mask|>": "<think>", "<|system|>": "</think>"}  # nothing else needs those two


def write_fixed_reply(path: Path, *, thought: str, text: str) -> Path:
    """Writes the model; its thought stands between <think> and </think>."""
    chain = [
        token_id("<|assistant|>"),
        *([token_id("<|mask|>"), *_bytes(thought), token_id("<|system|>")] if thought else ()),
        *_bytes(text),
        token_id("<|eos|>"),
    ]
    assert len(chain) == len(set(chain)), "a token occurs twice"
    n_vocab = len(vocabulary())
    output = np.zeros((n_vocab, N_EMBD), np.float32)
    for before, after in pairwise(chain):
        output[after, before] = 1.0
    kinds = [NORMAL] * (n_vocab - len(SPECIAL)) + [CONTROL] * len(SPECIAL)
    for name in RENAMED:
        kinds[token_id(name)] = USER_DEFINED  # such tokens are shown
    spec = TargetSpec(
        n_layer=1,
        n_embd=N_EMBD,
        layer_gain=0.0,
        metadata={
            "tokenizer.ggml.tokens": [RENAMED.get(token, token) for token in vocabulary()],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.mask_token_id": None,
        },
        tensors={
            "token_embd.weight": np.eye(n_vocab, N_EMBD, dtype=np.float32),
            "output_norm.weight": np.ones(N_EMBD, np.float32),
            "output.weight": output,
        },
    )
    return write_llama(path, spec)


def _bytes(text: str) -> Sequence[int]:
    return text.encode()
