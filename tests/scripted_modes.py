"""Modes of the bench on scripted engines, in place of models.

Refuses to know commands and what they print.
"""

from __future__ import annotations

from fake_decoder import FakeDecoder, Script, engine_on, letters

from dspark_edge import Engine
from dspark_edge.bench.modes import BenchMode, Opened, Setup


class ScriptedModes:
    """Stands in for open_mode. scripts: of modes whose target says something else."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.opened: list[str] = []
        self._modes: dict[int, str] = {}

    def open(self, mode: BenchMode, setup: Setup, n_seq: int) -> Opened:
        decoder = FakeDecoder(target=self.scripts.get(mode.name, letters), n_seq=n_seq)
        proposer = None if mode.speculation == "off" else "drafter"
        engine = engine_on(decoder, mode.speculation, proposer, verify_len=mode.verify_len)
        self.opened.append(mode.name)
        self._modes[id(engine)] = mode.name
        return Opened(mode, engine, engine._loaded)

    def name_of(self, engine: Engine) -> str:
        return self._modes[id(engine)]
