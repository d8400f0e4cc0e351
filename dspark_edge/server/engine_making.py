"""From the options of the command line to an engine.

Refuses to know when one is wanted (hub.py), and what is loaded (dspark_edge.loading).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..engine import DEFAULT_LIMITS, Engine
from ..loading import Progress, load
from .log import logger
from .settings import EngineOptions

MakeEngine = Callable[[Path, EngineOptions, Progress], Engine]


def make_engine(path: Path, options: EngineOptions, progress: Progress) -> Engine:
    """A real engine on a file, traced where that is asked for. Raises as Engine does."""
    engine = Engine.from_loaded(
        load(
            path,
            drafter=options.drafter,
            n_ctx=options.n_ctx,
            n_seq=options.n_seq,
            n_gpu_layers=options.n_gpu_layers,
            n_threads=options.n_threads,
            speculation=options.speculation,
            verify_len=None,
            cost_cache=options.cost_cache,
            limits=DEFAULT_LIMITS,
            progress=progress,
        )
    )
    if options.trace is not None:
        try:
            _trace(engine, options.trace)
        except ValueError:
            engine.close()
            raise
    return engine


def _trace(engine: Engine, path: Path) -> None:
    """A trace is of one model: the next one's does not replace it."""
    if path.is_file():
        logger.info("no trace of this model: %s has one; move it away and another begins", path)
        return
    engine.trace_to(path)
    logger.info("a trace is written to %s until the model is unloaded", path)
