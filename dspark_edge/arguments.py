"""Arguments that several commands take: their limits, and what this build does not heed.

Refuses to know which command it is.
"""

from __future__ import annotations

import os
import re

MIN_CTX, MAX_CTX = 8, 2**24  # as the core has them
THREADS_PER_CPU = 4  # beyond that a mistake: threads that wait for each other only slow it down

_FLAGS = {"n_ctx": "--ctx", "n_threads": "--threads", "n_gpu_layers": "--gpu-layers"}
_NAMES = re.compile(rf"\b({'|'.join(_FLAGS)})\b(?: = |=)?")
_SAID_TWICE = re.compile(r" \(n_ctx=\d+\)")  # behind the flag


def check_threads(n_threads: int | None) -> None:
    """Raises ValueError for a --threads that cannot be meant; None is the default."""
    n_cpus = os.cpu_count() or 1
    most = THREADS_PER_CPU * n_cpus
    if n_threads is not None and not 1 <= n_threads <= most:
        raise ValueError(
            f"--threads is {n_threads} but this machine has {n_cpus} processors; give 1 to {most}, "
            "or leave it out for one on each physical core"
        )


def check_ctx(n_ctx: int) -> None:
    """Raises ValueError for a --ctx that no context can have."""
    if not MIN_CTX <= n_ctx <= MAX_CTX:
        raise ValueError(f"--ctx is {n_ctx}; it must be {MIN_CTX} to {MAX_CTX} tokens")


def gpu_notice(n_gpu_layers: int | None) -> str:
    """Why --gpu-layers does nothing here, or "". None: it was not given."""
    if not n_gpu_layers:
        return ""
    import llama_cpp  # slow, and not needed by whoever only reads arguments

    if llama_cpp.llama_supports_gpu_offload():
        return ""
    return (
        f"--gpu-layers {n_gpu_layers} has no effect: this llama.cpp sees no GPU, all layers are on "
        "the CPU (the README tells how to build it for one)"
    )


def in_flags(message: object) -> str:
    """A message of the engine's with its parameters' names as the command line has them."""

    def flag(found: re.Match[str]) -> str:
        name = _FLAGS[found[1]]
        return f"{name} " if found[0] != found[1] else name

    return _NAMES.sub(flag, _SAID_TWICE.sub("", str(message)))
