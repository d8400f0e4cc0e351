"""Block speculative decoding (DSpark) for llama.cpp models: faster, with unchanged output.

Nothing heavy is imported before it is used: a command says its --help, and ends on Ctrl-C, at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import _llama as _llama  # from here on the extension cannot be loaded first: see there

if TYPE_CHECKING:
    from .accelerated import AcceleratedLlama, accelerate
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

_NAMES_OF = {
    "accelerated": ("AcceleratedLlama", "accelerate"),
    "engine": ("Engine",),
    "errors": (
        *("BusyError", "ContextFullError", "DecodeError", "DsparkError"),
        *("MemoryPlanError", "ModelError", "PairError"),
    ),
    "pressure": ("Action", "Limits"),
    "sequence": ("Chunk", "SamplingParams", "Stats"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    """A public name, on its first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # the next use finds it there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
