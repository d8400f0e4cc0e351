"""What the server says of itself: /health, /stats, /metrics.

Refuses to know requests that generate.
"""

from __future__ import annotations

from typing import Any

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from ..device import Reading, Readings
from ..pressure import STEPS
from .hub import ModelHub
from .jobs import Snapshot
from .metrics import Collector, Totals
from .settings import Settings

SNAPSHOT_WAIT_S = 0.2  # a busy engine's last snapshot is at most a round or a chunk older


class ServerState:
    """Reads the hub, the totals and the machine."""

    def __init__(self, settings: Settings, hub: ModelHub, totals: Totals) -> None:
        self._settings = settings
        self._hub = hub
        self._totals = totals
        self._readings = Readings()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(Collector(totals, self._gauges, self._pressure))

    async def health(self) -> tuple[int, dict[str, Any]]:
        """(HTTP status, body): 200 when a request would be served, if need be after loading."""
        snapshot = await self._hub.snapshot(SNAPSHOT_WAIT_S)
        hub = self._hub
        body: dict[str, Any] = {
            "status": hub.state,
            "model": hub.model_id,
            **hub.progress(),
            "queue": {"n_requests": hub.n_requests, "n_waiting": hub.n_waiting},
            "memory": self._memory(snapshot),
        }
        if hub.failure:
            body["failure"] = hub.failure
        if snapshot is not None:
            body |= _speculation(snapshot)
        return (503 if hub.state in ("loading", "failed") else 200), body

    async def stats(self) -> dict[str, Any]:
        """The totals, the last minute and the state, for user interfaces."""
        _, health = await self.health()
        snapshot = self._hub.last_snapshot
        return {
            **health,
            **self._totals.to_json(),
            "acceptance_by_position": snapshot.acceptance_by_position if snapshot else (),
            "n_ctx": self._settings.engine.n_ctx,
            "n_seq": self._settings.engine.n_seq,
            "device": _device(self._readings.latest()),
        }

    def metrics(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self._registry)

    def _memory(self, snapshot: Snapshot | None) -> dict[str, int | None]:
        reading = self._readings.latest()
        parts: dict[str, int | None] = dict(snapshot.memory) if snapshot else {}
        return parts | {
            "process_bytes": psutil.Process().memory_info().rss,
            "ram_free_bytes": reading.ram_free_bytes,
            "ram_total_bytes": reading.ram_total_bytes,
        }

    def _gauges(self) -> dict[tuple[str, str], float]:
        reading = self._readings.latest()
        free, total = reading.ram_free_bytes, reading.ram_total_bytes
        totals = self._totals
        gauges = {
            ("requests_running", "jobs in the engine"): self._hub.n_requests - self._hub.n_waiting,
            ("requests_waiting", "jobs that wait for a turn"): self._hub.n_waiting,
            ("parked", "1 while drafting is parked"): totals.is_parked(),
            ("tau", "tokens per round"): totals.n_tokens / max(totals.n_rounds, 1),
            ("model_loaded", "1 while a model is in memory"): self._hub.state == "ready",
        }
        if free is not None and total:
            gauges["memory_pressure", "share of memory in use"] = 1.0 - free / total
        return {name: float(value) for name, value in gauges.items()}

    def _pressure(self) -> dict[str, bool]:
        snapshot = self._hub.last_snapshot
        taken = {action.kind for action in snapshot.pressure} if snapshot is not None else set()
        return {step: step in taken for step in (*STEPS, "raise_bar")}


def _speculation(snapshot: Snapshot) -> dict[str, Any]:
    state, _, reason = snapshot.speculation.partition(": ")
    return {
        "target": snapshot.target,
        "drafter": snapshot.drafter,
        "speculation": {"state": state, "reason": reason, "text": snapshot.speculation},
        "notices": snapshot.notices,
        "pressure": [{"step": a.kind, "text": a.text} for a in snapshot.pressure],
    }


def _device(reading: Reading) -> dict[str, Any]:
    return {
        "temperature_c": reading.temperature_c,
        "is_throttled": reading.is_throttled,
        "on_battery": reading.on_battery,
        "load_per_core": reading.load_per_core,
    }
