"""What an engine says of itself, for user interfaces: what is loaded, what is going on and why.

Refuses to know requests.
"""

from __future__ import annotations

from ._core import MemoryUse
from .loading import Identity, Loaded
from .pressure import Action
from .speculation import Mode
from .trace import TraceHeader


class EngineState:
    """The part of an Engine that tells."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._decoder = loaded.decoder
        self._speculation = loaded.speculation
        self._governor = loaded.governor
        self._n_ctx = loaded.decoder.n_ctx  # kept: a closed decoder says nothing
        self._is_closed = False

    # ------------------------------------------------------------ what is loaded

    @property
    def target_name(self) -> str:
        """The target's name, as its file or its metadata give it."""
        return self._loaded.target_name

    @property
    def drafter_name(self) -> str:
        """The drafter's file name, "lookup", or "none"."""
        return self._loaded.drafter_name

    @property
    def identity(self) -> Identity:
        """Which files are loaded: what a saved cache is good for."""
        return self._loaded.identity

    @property
    def device_name(self) -> str:
        """What the target runs on, e.g. "CPU, 2 threads"."""
        return self._loaded.device_name

    @property
    def notices(self) -> list[str]:
        """What the user should know about loading, e.g. why a drafter is not used."""
        return self._loaded.notices

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self._n_ctx

    def memory_use(self) -> MemoryUse:
        """Bytes that llama.cpp has allocated for weights, caches and compute buffers."""
        self._refuse_if_closed()
        return self._decoder.memory_use()

    @property
    def graph_chain_reason(self) -> str:
        """Why the drafter's Markov chain is left to llama.cpp, slower on a CPU; "" where it
        is not, or before the first draft."""
        return self._decoder.graph_chain_reason

    # ------------------------------------------------------------ what is going on

    @property
    def speculation_state(self) -> str:
        """State of speculation and the reason, in words."""
        return self._speculation.reason

    @property
    def speculation_mode(self) -> Mode:
        """The mode in force: "auto", "always" or "off"."""
        return self._speculation.mode

    @property
    def pressure(self) -> tuple[Action, ...]:
        """What is given up now because the machine is short of something, and why."""
        return self._governor.in_force if self._governor is not None else ()

    def take_pressure_news(self) -> list[str]:
        """What was given up and taken back since the last call, a line each."""
        return self._governor.take_news() if self._governor is not None else []

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) per draft position, given that the positions before were right."""
        return self._speculation.acceptance_by_position

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed; make a new one")

    def _trace_header(self) -> TraceHeader:
        cost = self._speculation.cost.to_json()
        return TraceHeader(
            target=self.target_name,
            drafter=self.drafter_name,
            n_ctx=self.n_ctx,
            n_seq=self._decoder.n_seq,
            block=self._speculation.n_proposed_max,
            mode=self._speculation.mode,
            cost=cost if cost["verify"] else None,  # "always" and "off" time no passes
        )
