"""The trace of a run: one JSON line per round and event, written while decoding, read afterwards.

Owns: the format (version 1) and its checks. A trace that cannot be written never breaks decoding.
Refuses to know: the engine that fills it in, and what is made of it (bench explain, bench replay).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .checked_json import (
    array,
    count,
    counts,
    flag,
    is_number,
    json_object,
    numbers,
    one_of,
    seconds,
    text,
)
from .cost import CostTable

FORMAT_VERSION = 1
MODES = ("auto", "always", "off")
PROPOSERS = ("drafter", "lookup")
EVENTS = ("pressure", "notice")

Alternative = tuple[int, float, float]  # batch_tokens, expected_tokens, expected_s


@dataclass(slots=True, kw_only=True)
class TraceHeader:
    """What ran. block: draft tokens per sequence at most; cost: CostTable.to_json() or None.

    The table is as the trace began.
    """

    target: str
    drafter: str
    n_ctx: int
    n_seq: int
    block: int
    mode: str
    cost: dict[str, object] | None = None
    trace: int = FORMAT_VERSION


@dataclass(slots=True, kw_only=True)
class TraceBlock:
    """One proposal, verified or not; its lists run over its tokens (see DraftSignals)."""

    proposer: str
    tokens: list[int]
    confidence: list[float] | None = None
    certainty: list[float] = field(default_factory=list)
    match_len: int = 0
    survival: list[float] = field(default_factory=list)
    is_cached: bool = False
    cache_agreement: list[float] = field(default_factory=list)
    cache_count: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TraceSequence:
    """What one round did for one request.

    position: of the first token after the anchor. proposer: whose tokens were verified, None when
    the anchor went alone.
    """

    request: int
    position: int
    emitted: list[int]
    n_accepted: int = 0
    verify_len: int = 0
    proposer: str | None = None
    blocks: list[TraceBlock] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TraceRound:
    """One round. Times in seconds; draft_s is 0 without a drafter pass, own_s is the rest.

    pass_s: of verify_s, llama.cpp, as a cost table has it; None in traces from before it was kept.
    alternatives: (batch_tokens, expected_tokens, expected_s) of verifying nothing, of the best
    without the drafter, and of the best with it where it ran.
    """

    round: int
    t_s: float
    depth: int
    state: str
    batch_tokens: int
    verify_s: float
    own_s: float
    draft_s: float = 0.0
    pass_s: float | None = None
    predicted_s: float | None = None
    alternatives: list[Alternative] = field(default_factory=list)
    sequences: list[TraceSequence] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.verify_s + self.own_s


@dataclass(slots=True, kw_only=True)
class TraceEvent:
    """Something that happened between rounds. event: "pressure" or "notice"."""

    event: str
    t_s: float
    text: str


@dataclass(slots=True)
class Trace:
    """One run, read back."""

    header: TraceHeader
    rounds: list[TraceRound]
    events: list[TraceEvent]


class TraceWriter:
    """Appends to a new trace file, flushed line by line; `t_s` is the clock to stamp lines with.

    A line that cannot be written warns once and ends the trace; decoding goes on. Raises ValueError
    when the file cannot be opened in the first place.
    """

    __slots__ = ("_file", "_start", "path")

    def __init__(self, path: str | Path) -> None:
        """An existing file is replaced."""
        self.path = Path(path)
        self._start = time.perf_counter()
        try:
            self._file: TextIO | None = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"trace file {self.path} cannot be written ({error.strerror}); pass another path"
            ) from error

    @property
    def t_s(self) -> float:
        """Seconds since the trace began."""
        return time.perf_counter() - self._start

    @property
    def is_on(self) -> bool:
        """Whether lines still reach the file."""
        return self._file is not None

    def write(self, line: TraceHeader | TraceRound | TraceEvent | dict[str, object]) -> None:
        """Append one line: the header first, then rounds and events in any order."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, default=_fields, allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError, TypeError) as error:
            self.close()
            message = f"trace {self.path} ends here, it cannot be written: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """End the trace; further lines are dropped."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # a full disk shows again when the rest is flushed
                return

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_trace(path: str | Path) -> Trace:
    """Read and check a trace.

    Raises ValueError with the number of the first line that is not as the format says; OSError
    when the file cannot be read.
    """
    header: TraceHeader | None = None
    rounds: list[TraceRound] = []
    events: list[TraceEvent] = []
    n_line = 0
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for n_line, raw in enumerate(file, start=1):
            try:
                line = json_object(_parse(raw), "line")
                if header is None:
                    header = _header(line)
                elif "event" in line:
                    events.append(_event(line))
                else:
                    rounds.append(_round(line))
            except ValueError as error:
                raise ValueError(f"{path} line {n_line}: {error}") from None
    if header is None:
        raise ValueError(f"{path} line {n_line + 1}: the file is empty; record a trace first")
    return Trace(header=header, rounds=rounds, events=events)


def _fields(value: object) -> dict[str, object]:
    """A dataclass with slots as a dict, for json; cheaper than dataclasses.asdict, which copies."""
    names = getattr(value, "__dataclass_fields__", None)
    if names is None:
        raise TypeError(f"{type(value).__name__} does not belong into a trace")
    return {name: getattr(value, name) for name in names}


# ---------------------------------------------------------------- checks


def _parse(raw: str) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        if not raw.endswith("\n"):
            raise ValueError("cut off; delete this line to read the rest") from error
        raise ValueError(f"not JSON ({error})") from error


def _header(line: dict[str, Any]) -> TraceHeader:
    if line.get("trace") != FORMAT_VERSION:
        raise ValueError(
            f"trace version is {line.get('trace')!r} but {FORMAT_VERSION} is read; "
            "is this a trace? record it anew"
        )
    cost = line.get("cost")
    if cost is not None:
        CostTable.from_json(cost)
    return TraceHeader(
        target=text(line, "target"),
        drafter=text(line, "drafter"),
        n_ctx=count(line, "n_ctx"),
        n_seq=count(line, "n_seq"),
        block=count(line, "block"),
        mode=one_of(line, "mode", MODES),
        cost=cost,
    )


def _event(line: dict[str, Any]) -> TraceEvent:
    return TraceEvent(
        event=one_of(line, "event", EVENTS), t_s=seconds(line, "t_s"), text=text(line, "text")
    )


def _round(line: dict[str, Any]) -> TraceRound:
    return TraceRound(
        round=count(line, "round"),
        t_s=seconds(line, "t_s"),
        depth=count(line, "depth"),
        state=text(line, "state"),
        batch_tokens=count(line, "batch_tokens"),
        draft_s=seconds(line, "draft_s"),
        verify_s=seconds(line, "verify_s"),
        own_s=seconds(line, "own_s"),
        pass_s=_seconds_if_any(line, "pass_s"),
        predicted_s=_seconds_if_any(line, "predicted_s"),
        alternatives=[_alternative(value) for value in array(line, "alternatives")],
        sequences=[_sequence(json_object(s, "sequence")) for s in array(line, "sequences")],
    )


def _seconds_if_any(line: dict[str, Any], name: str) -> float | None:
    return None if line.get(name) is None else seconds(line, name)


def _sequence(data: dict[str, Any]) -> TraceSequence:
    sequence = TraceSequence(
        request=count(data, "request"),
        position=count(data, "position"),
        emitted=counts(data, "emitted"),
        n_accepted=count(data, "n_accepted"),
        verify_len=count(data, "verify_len"),
        proposer=None if data.get("proposer") is None else one_of(data, "proposer", PROPOSERS),
        blocks=[_block(json_object(b, "block")) for b in array(data, "blocks")],
    )
    if sequence.n_accepted > sequence.verify_len:
        raise ValueError(
            f"n_accepted {sequence.n_accepted} is more than verify_len {sequence.verify_len}"
        )
    return sequence


def _block(data: dict[str, Any]) -> TraceBlock:
    data = {"is_cached": False, "cache_agreement": [], "cache_count": [], **data}  # older traces
    block = TraceBlock(
        proposer=one_of(data, "proposer", PROPOSERS),
        tokens=counts(data, "tokens"),
        confidence=None if data.get("confidence") is None else numbers(data, "confidence"),
        certainty=numbers(data, "certainty"),
        match_len=count(data, "match_len"),
        survival=numbers(data, "survival"),
        is_cached=flag(data, "is_cached"),
        cache_agreement=numbers(data, "cache_agreement"),
        cache_count=counts(data, "cache_count"),
    )
    n_tokens = len(block.tokens)
    lists: tuple[tuple[str, Sequence[float] | None], ...] = (
        ("confidence", block.confidence),
        ("certainty", block.certainty),
        ("cache_agreement", block.cache_agreement),
        ("cache_count", block.cache_count),
    )
    for name, values in lists:
        if values and len(values) != n_tokens:
            raise ValueError(f"{name} has {len(values)} values but the block has {n_tokens} tokens")
    return block


def _alternative(value: object) -> Alternative:
    if not isinstance(value, list) or len(value) != 3 or not all(map(is_number, value)):
        raise ValueError("alternatives must be [batch_tokens, expected_tokens, expected_s]")
    return int(value[0]), float(value[1]), float(value[2])
