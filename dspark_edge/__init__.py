"""Block speculative decoding (DSpark) for llama.cpp models: faster, with unchanged output."""

from . import _llama as _llama  # first: see there

# isort: split
from .engine import Engine
from .errors import (
    ContextFullError,
    DecodeError,
    DsparkError,
    MemoryPlanError,
    ModelError,
    PairError,
)
from .sequence import Chunk, SamplingParams, Stats

__all__ = [
    "Chunk",
    "ContextFullError",
    "DecodeError",
    "DsparkError",
    "Engine",
    "MemoryPlanError",
    "ModelError",
    "PairError",
    "SamplingParams",
    "Stats",
]
