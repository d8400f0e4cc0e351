"""A conversation as it is kept, and its JSON: versioned, with a checksum over all that is said.

Refuses to know folders and engines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from . import checked_json as checked
from .sequence import SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

FORMAT, VERSION = "dspark-edge session", 1


@dataclass(slots=True, kw_only=True)
class Session:
    """A conversation: what was said, and how the next reply is drawn.

    messages: as given to Engine.chat; JSON values only. params: of the next reply. seed: the one
    that the last reply was drawn with (Stats.seed), None before the first. tokens: prompt and reply
    as ids where a reply was cut off in the middle, empty otherwise; `generate(tokens)` with the
    same seed goes on exactly there, because noise is keyed by seed and absolute position: the
    position of the noise is the number of tokens. extra: the front end's own settings; JSON values
    only. target, drafter, calibration: what it was made with, as in Engine.identity.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    drafter: str = ""
    calibration: str = ""

    def made_with(self, engine: Engine) -> None:
        """Notes what the engine runs."""
        identity = engine.identity
        self.target, self.drafter = identity.target, identity.drafter
        self.calibration = identity.calibration

    @property
    def title(self) -> str:
        """The beginning of what the user said first, in one line."""
        said = (m.get("content") for m in self.messages if m.get("role") == "user")
        line = " ".join(next((c for c in said if isinstance(c, str)), "").split())
        printable = "".join(c if c.isprintable() else " " for c in line)
        return printable if len(printable) <= TITLE_CHARS else printable[: TITLE_CHARS - 1] + "…"


TITLE_CHARS = 60


@dataclass(slots=True, frozen=True)
class KvFile:
    """The file, beside the session's, that both KV states are in."""

    name: str
    n_bytes: int


@dataclass(slots=True, frozen=True)
class Stored:
    """What a session's file holds. saved_at: seconds since the epoch."""

    session: Session
    saved_at: float
    kv: KvFile | None


def session_text(stored: Stored) -> str:
    """The JSON of a session. Raises ValueError for what is no JSON value."""
    session = stored.session
    content = {
        "saved_at": stored.saved_at,
        "messages": session.messages,
        "params": _params_json(session.params),
        "seed": session.seed,
        "tokens": session.tokens,
        "extra": session.extra,
        "target": session.target,
        "drafter": session.drafter,
        "calibration": session.calibration,
        "kv": {"name": stored.kv.name, "n_bytes": stored.kv.n_bytes} if stored.kv else None,
    }
    try:
        head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(content)}
        return json.dumps(head | {"session": content}, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the session holds what JSON cannot: {error}") from error


def session_of(text: str) -> Stored:
    """What session_text wrote. Raises ValueError, a line that says what is wrong."""
    try:
        data = checked.json_object(json.loads(text), "it")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if data.get("format") != FORMAT:
        raise ValueError("it is no session of this program")
    version = checked.count(data, "version")
    if version > VERSION:
        raise ValueError(
            f"it has version {version} but this program reads up to {VERSION}; update dspark-edge"
        )
    content = checked.json_object(data.get("session"), "session")
    if data.get("checksum") != _checksum(content):
        raise ValueError("its checksum does not match: it was damaged, or changed by hand")
    tokens = checked.counts(content, "tokens")
    return Stored(
        Session(
            messages=_messages(content),
            params=_params_of(checked.json_object(content.get("params"), "params")),
            seed=None if content.get("seed") is None else checked.count(content, "seed"),
            tokens=tokens,
            extra=checked.json_object(content.get("extra"), "extra"),
            target=checked.text(content, "target"),
            drafter=checked.text(content, "drafter"),
            calibration=checked.text(content, "calibration"),
        ),
        saved_at=checked.seconds(content, "saved_at"),
        kv=_kv_of(content.get("kv")),
    )


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()  # json escapes all that is not ASCII


def _messages(content: dict[str, Any]) -> list[dict[str, Any]]:
    messages = checked.array(content, "messages")
    return [checked.json_object(message, f"message {i}") for i, message in enumerate(messages)]


def _kv_of(data: object) -> KvFile | None:
    if data is None:
        return None
    kv = checked.json_object(data, "kv")
    return KvFile(checked.text(kv, "name"), checked.count(kv, "n_bytes"))


def _params_json(params: SamplingParams) -> dict[str, Any]:
    data: dict[str, Any] = {f.name: getattr(params, f.name) for f in fields(params)}
    data["stop"] = params.stop if isinstance(params.stop, str) else list(params.stop)
    # As text: JSON has no infinity, and its keys are no numbers.
    data["logit_bias"] = [[token, repr(bias)] for token, bias in params.logit_bias.items()]
    if isinstance(params.json_schema, Mapping):
        data["json_schema"] = dict(params.json_schema)
    return data


def _params_of(data: dict[str, Any]) -> SamplingParams:
    known = {f.name for f in fields(SamplingParams)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"params has {unknown[0]!r}, which this program does not know")
    try:
        bias = {token: float(value) for token, value in data.get("logit_bias", [])}
        stop = data.get("stop", ())
        stop = stop if isinstance(stop, str) else tuple(stop)
        return SamplingParams(**data | {"logit_bias": bias, "stop": stop})
    except TypeError as error:
        raise ValueError(f"params is malformed: {error}") from error
