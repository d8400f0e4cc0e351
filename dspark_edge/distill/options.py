"""What a run of the trainer is given.

Plain values; refuses to know the command line and what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .precision import Precision
from .settings import DataSettings, Kind, TrainSettings


@dataclass(slots=True, kw_only=True)
class Options:
    """What the command was given. n_threads bounds llama.cpp's and PyTorch's threads alike."""

    target: Path
    out: Path
    work: Path
    hours: float = 2.0
    given: list[str] = field(default_factory=list)
    from_chats: bool = False  # whether the user's own chats are among them
    n_threads: int = 1
    disk_bytes: int = 20 << 30
    kind: Kind = "q8_0"
    n_draft_max: int = 8192
    n_layer: int = 2
    block_size: int = 4
    rank: int = 64
    taps: tuple[int, ...] | None = None
    start: Path | None = None  # a drafter that training goes on from
    device: str = "auto"
    precision: Precision = "auto"
    max_sequences: int | None = None
    max_steps: int | None = None
    n_trial_prompts: int = 12  # of each set, if the time allows
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
