"""Block speculative decoding (DSpark) for llama.cpp models: faster, with unchanged output."""

from . import _llama as _llama  # first: see there

# isort: split
from .accelerate import AcceleratedLlama, accelerate
from .engine import Engine
from .errors import (
    BusyError,
    ContextFullError,
    DecodeError,
    DsparkError,
    MemoryPlanError,
    ModelError,
    PairError,
)
from .pressure import Action, Limits
from .sequence import Chunk, SamplingParams, Stats

__all__ = [
    "AcceleratedLlama",
    "Action",
    "BusyError",
    "Chunk",
    "ContextFullError",
    "DecodeError",
    "DsparkError",
    "Engine",
    "Limits",
    "MemoryPlanError",
    "ModelError",
    "PairError",
    "SamplingParams",
    "Stats",
    "accelerate",
]
