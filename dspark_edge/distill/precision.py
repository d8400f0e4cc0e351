"""Which number type the products of training are taken in: what this machine is fastest at.

Measured, since neither an instruction's name nor its presence tells what a library makes of it.
Refuses to know the drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]
N_ROWS, N_IN, N_OUT = 1024, 768, 576  # of a product as small targets have them
N_RUNS = 10
WORTH_IT = 1.3  # times as fast


def train_dtype(
    precision: Precision, device: torch.device, say: Callable[[str], None]
) -> torch.dtype:
    """The type that was asked for; of auto bfloat16 where the CPU gains by it. Says what and why.

    Other devices keep float32 unless asked: their gain is not measured here.
    """
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    if device.type != "cpu":
        return torch.float32
    gain = bfloat16_gain()
    name = "bfloat16" if gain >= WORTH_IT else "float32"
    say(f"training in {name}: products in bfloat16 are {gain:.1f} times as fast here as in float32")
    return torch.bfloat16 if gain >= WORTH_IT else torch.float32


def bfloat16_gain() -> float:
    """How many times as fast a product in bfloat16 is, with the threads that PyTorch has.

    Of the fastest runs, taken in turn: other programs only make one slower.
    """
    in_float32 = in_bfloat16 = float("inf")
    for _ in range(N_RUNS):
        in_float32 = min(in_float32, _product_s(torch.float32))
        in_bfloat16 = min(in_bfloat16, _product_s(torch.bfloat16))
    return in_float32 / in_bfloat16


def _product_s(dtype: torch.dtype) -> float:
    x, matrix = torch.ones(N_ROWS, N_IN, dtype=dtype), torch.ones(N_OUT, N_IN, dtype=dtype)
    start = time.perf_counter()
    torch.mm(x, matrix.T)
    return time.perf_counter() - start
