"""The modes that bench run compares, by name, and the engine that each of them is.

Refuses to know what is run and what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine import Engine
from ..loading import Loaded, load
from ..speculation import Mode as Speculating

NAMES = "plain, auto, lookup, fixed:N, fixed:max, fixed-lookup:N, fixed-lookup:max"


@dataclass(slots=True, frozen=True)
class BenchMode:
    """One way to decode. verify_len: draft tokens in every round of "always"; None for all."""

    name: str
    speculation: Speculating
    looks_up: bool = False  # instead of the drafter
    verify_len: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether every round verifies the same number of draft tokens."""
        return self.speculation == "always"


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """What the engines of all modes have in common; parameters as Engine takes them."""

    target: str
    drafter: str
    n_ctx: int
    n_threads: int | None
    cost_cache: Path | None = None


@dataclass(slots=True)
class Opened:
    """An engine in one of the modes, and what it was made of."""

    mode: BenchMode
    engine: Engine
    loaded: Loaded

    @property
    def cost(self) -> dict[str, object]:
        """The cost table as it is by now, as JSON."""
        return self.loaded.speculation.cost.to_json()


def parse_modes(text: str) -> list[BenchMode]:
    """Modes of a comma-separated list. Raises ValueError on an unknown or a repeated one."""
    modes = [_parse(name.strip()) for name in text.split(",")]
    names = [mode.name for mode in modes]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"--modes has {repeated} twice; give each mode once")
    return modes


def _parse(name: str) -> BenchMode:
    kind, colon, length = name.partition(":")
    if name == "plain":
        return BenchMode(name, "off")
    if name in ("auto", "lookup"):
        return BenchMode(name, "auto", looks_up=name == "lookup")
    if kind in ("fixed", "fixed-lookup") and colon:
        looks_up = kind == "fixed-lookup"
        if length == "max":
            return BenchMode(name, "always", looks_up=looks_up)
        if length.isdecimal() and int(length) >= 1:
            return BenchMode(f"{kind}:{int(length)}", "always", looks_up, int(length))
    raise ValueError(f"--modes has {name!r}; the modes are {NAMES} (N at least 1)")


def open_mode(mode: BenchMode, setup: Setup, n_seq: int) -> Opened:
    """Loads the engine of a mode.

    Raises as Engine does, ValueError when a fixed length passes what is proposed at most.
    """
    loaded = load(
        setup.target,
        drafter="lookup" if mode.looks_up else setup.drafter,
        n_ctx=setup.n_ctx,
        n_seq=n_seq,
        n_gpu_layers=-1,
        n_threads=setup.n_threads,
        speculation=mode.speculation,
        verify_len=mode.verify_len,
        cost_cache=setup.cost_cache,
    )
    opened = Opened(mode, Engine.from_loaded(loaded), loaded)
    most = loaded.speculation.n_proposed_max
    # 0: nothing may speculate here, and a notice says why.
    if mode.verify_len is not None and 0 < most < mode.verify_len:
        opened.engine.close()
        raise ValueError(f"--modes has {mode.name}, but drafts here have at most {most} tokens")
    return opened
