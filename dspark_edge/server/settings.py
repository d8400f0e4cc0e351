"""What the server was told at its start: addresses, models, limits; and what of it is unsafe.

Refuses to know how any of it is carried out.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from ..speculation import Mode

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
BODY_BYTES = 1 << 20  # whatever the context holds: tools, schemas, and what is not text
BODY_BYTES_PER_TOKEN = 16  # of text in JSON, escapes and all
MIN_KEY_LEN = 16  # characters: below that a key can be guessed over the network


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """What one request may ask for. Sizes in bytes, times in seconds.

    body_bytes: of a whole body; None: as much as a conversation that fills the context may need,
    see Settings.body_bytes. head_s, body_s: to send it. write_s: to take what was sent.
    """

    body_bytes: int | None = None
    head_s: float = 30.0
    body_s: float = 30.0
    write_s: float = 30.0
    bytes_per_token: int = 256  # longest prompt text: this for each token that the context holds
    n_choices: int = 16
    n_stops: int = 16
    stop_len: int = 256  # characters
    n_biases: int = 1024
    n_tools: int = 64
    grammar_bytes: int = 64 << 10
    grammar_s: float = 2.0  # that a round may spend outside llama.cpp while a grammar is in it
    schema_depth: int = 32
    schema_nodes: int = 2000
    repetitions: int = 200  # minLength, maxItems and their like
    n_optional: int = 32  # parts in a row, of an object or a pattern, that may be left out


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineOptions:
    """How engines are made; dspark_edge.Engine has their meaning. trace: see Engine.trace_to."""

    drafter: str | None = "auto"
    n_ctx: int = 4096
    n_seq: int = 4
    n_gpu_layers: int = -1
    n_threads: int | None = None
    speculation: Mode = "auto"
    cost_cache: Path | None = None
    trace: Path | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Settings:
    """Everything that the command line decides.

    max_queue: requests that may wait beside those that run. keep_alive_s: idle seconds before the
    model is unloaded, -1 for never. drain_s: how long running replies may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    model: str = "default"
    models_dirs: tuple[Path, ...] = ()
    chat_template: str | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    allow_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 64
    keep_alive_s: float = 300.0
    drain_s: float = 30.0
    parent_pid: int | None = None
    log_content: bool = False

    def __post_init__(self) -> None:
        for name in ("allow_hosts", "cors_origins"):  # as browsers write them
            lowered = tuple(each.lower() for each in getattr(self, name))
            object.__setattr__(self, name, lowered)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be 0 (any) to 65535")
        if self.max_queue < 0:
            raise ValueError(f"max_queue is {self.max_queue}; it must be 0 or more")
        if self.engine.n_seq < 1:
            raise ValueError(f"parallel is {self.engine.n_seq}; it must be at least 1")
        if self.api_key is not None and len(self.api_key) < MIN_KEY_LEN:
            raise ValueError(
                f"the API key has {len(self.api_key)} characters; use at least {MIN_KEY_LEN}"
            )
        if self.api_key is None and not self.is_loopback:
            raise ValueError(
                f"host is {self.host}, which others can reach; "
                "give an API key with --api-key-file, or stay on 127.0.0.1"
            )
        for host in self.allow_hosts:
            if not _is_host(host):
                raise ValueError(
                    f"allowed host is {host!r}; write the name or address alone, without scheme, "
                    "port and brackets, e.g. box.lan: it holds for every port"
                )
        for origin in self.cors_origins:
            if "://" not in origin or origin.endswith("/"):
                raise ValueError(
                    f"origin is {origin!r}; write scheme, host and port, e.g. http://localhost:3000"
                )

    @property
    def body_bytes(self) -> int:
        """The largest body that is read.

        While JSON is parsed nothing else runs in the process, so this is no more than is needed.
        """
        if self.limits.body_bytes is not None:
            return self.limits.body_bytes
        return BODY_BYTES + self.engine.n_ctx * BODY_BYTES_PER_TOKEN

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _is_host(text: str) -> bool:
    """Whether a Host header can have it as its name, port left out."""
    try:
        return ipaddress.ip_address(text).version in (4, 6)
    except ValueError:
        return bool(text) and not set(text) & set(":/@[] ")
