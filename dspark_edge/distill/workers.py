"""Sequences side by side, each on a CPU thread of its own.

One sequence's tensors are small: threads within its products gain nothing, threads beside each
other nearly all that they could. Refuses to know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def count_for(device: torch.device, *, n_threads: int, n_sequences: int) -> int:
    """How many are worth having: other devices than CPUs have one queue."""
    return min(n_threads, n_sequences) if device.type == "cpu" else 1


class Workers:
    """n threads; with one of them all runs in the caller's, with the threads that PyTorch has."""

    def __init__(self, n: int, *, n_threads: int) -> None:
        """n_threads: of all workers together."""
        self._n_each = max(1, n_threads // n)
        self._pool = (
            ThreadPoolExecutor(
                n, "distill", initializer=torch.set_num_threads, initargs=(self._n_each,)
            )
            if n > 1
            else None
        )

    def close(self) -> None:
        """Waits for what runs; contextlib.closing calls it."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, compute: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """compute of each item, in their order. Raises what one of them raised."""
        if self._pool is None:
            return [compute(item) for item in items]
        n_threads = torch.get_num_threads()
        torch.set_num_threads(self._n_each)  # a part of PyTorch has one number for all
        try:
            return list(self._pool.map(compute, items))
        finally:
            torch.set_num_threads(n_threads)
