"""What a drafter is shaped like and how it is trained, as plain numbers.

Refuses to know files and tensors.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..files import fingerprint, write_atomically

Kind = Literal["f16", "q8_0"]
SETTINGS_FILE = "settings.json"
DATA_SHARE = 0.4  # of the time; held-out tau of the demo drafter was best at 6 times each token
RESERVE, RESERVE_MAX = 0.07, 0.3  # of the time, for what comes after training, and ...
RESERVE_S = 120.0  # ... the seconds that it should have


@dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """A drafter's own numbers, as they stand in its GGUF. taps: target layers whose input it
    reads."""

    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rank: int
    block_size: int
    taps: tuple[int, ...]
    eps: float
    rope_base: float
    mask_token: int

    @property
    def n_feature(self) -> int:
        """Floats per token that the drafter reads."""
        return len(self.taps) * self.n_embd


@dataclass(slots=True, frozen=True, kw_only=True)
class DataSettings:
    """How text is drawn from the target. Lengths in tokens."""

    n_seq: int = 32
    max_prompt: int = 192
    max_reply: int = 320
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.8, 1.0)
    drawn_share: float = 0.5  # of the prompts, where others are given
    seed: int = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainSettings:
    """How the drafter learns. Rates are those at the top of the schedule."""

    sequences_per_step: int = 8
    n_random: int = 384  # draft tokens beside the likely ones in each sequence's softmax
    n_exact: int = 1024  # draft vocabularies up to this size are always taken whole
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    slot_decay: float = 0.85
    confidence_weight: float = 0.3
    checkpoint_s: float = 120.0
    seed: int = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Shares:
    """Parts of the time, each until a stage's end: sampling, training, comparing with llama.cpp,
    calibrating, measuring. What is left after them is for what ends late."""

    data: float
    train: float
    parity: float
    calibrate: float
    measure: float


def shares_of(total_s: float) -> Shares:
    """For a run of so many seconds: what comes after training needs some in any case (models are
    loaded and prompts run), so that a short run reserves a larger part for it."""
    reserve = max(RESERVE, min(RESERVE_S / total_s, RESERVE_MAX))

    def after(used: float) -> float:
        return 1.0 - reserve * (1.0 - used)

    return Shares(
        data=DATA_SHARE,
        train=after(0.0),
        parity=after(0.25),
        calibrate=after(0.5),
        measure=after(0.85),
    )


def check_same_work(work: Path, target: Path, shape: Shape, data: DataSettings) -> bool:
    """Remember what a work folder is for, or see that it is for the same. Whether it is new.

    Raises ValueError when it belongs to another target or other settings, OSError when it cannot
    be written.
    """
    wanted = {"target": fingerprint(target), "shape": asdict(shape), "data": asdict(data)}
    text = json.dumps(wanted, indent=1)
    path = work / SETTINGS_FILE
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{work} was begun for another target or other settings; "
                "remove it, or give another --work"
            )
        return False
    if not write_atomically(path, text):
        raise OSError(f"{path} cannot be written; give another --work")
    return True
