"""What the chat tells about itself in words: banner, status line, statistics, coloured tokens.

Refuses to know where it is shown.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import Any

from ..arguments import in_flags
from ..engine import Engine
from ..models.memory_plan import read_room
from ..sequence import Stats
from .conversation import Piece

MB = 1_000_000
MANY_MB = 10_000  # from there on in GB
DRAFTED_STYLE, OWN_STYLE = "green", "yellow"


def banner(engine: Engine, *, asked_for: str) -> list[str]:
    """At most six lines: model, drafter, device and context, memory, speculation, the rest.

    asked_for: the drafter that the engine was asked for.
    """
    notices = [in_flags(notice) for notice in engine.notices]
    drafter = engine.drafter_name
    if notices and asked_for == "auto" and drafter == "lookup":
        drafter += f" ({notices.pop(0)})"  # lookup in a drafter's place: the first one says why
    lines = [
        f"model: {engine.target_name}",
        f"drafter: {drafter}",
        f"device: {engine.device_name} | context: {engine.n_ctx} tokens",
        f"memory: {memory(engine)}",
        f"speculation: {engine.speculation_state}",
    ]
    return [*lines, f"notice: {'; '.join(notices)}"] if notices else lines


def memory(engine: Engine) -> str:
    """E.g. "target 137 MB (context 24 MB of it), drafter 21 MB; 2900 MB RAM usable"."""
    use = engine.memory_use()
    target = use.target_model_bytes + use.target_context_bytes + use.target_compute_bytes
    drafter = use.drafter_model_bytes + use.drafter_context_bytes + use.drafter_compute_bytes
    parts = [f"target {_mb(target)} (context {_mb(use.target_context_bytes)} of it)"]
    parts += [f"drafter {_mb(drafter)}"] if drafter else []
    room = read_room()
    left = [
        f"{_mb(n_bytes)} {name}"
        for name, n_bytes in (("RAM", room.ram_bytes), ("GPU memory", room.vram_bytes))
        if n_bytes is not None
    ]
    return ", ".join(parts) + (f"; {' and '.join(left)} usable" if left else "")


def _mb(n_bytes: int) -> str:
    n_mb = n_bytes / MB
    return f"{n_mb:.0f} MB" if n_mb < MANY_MB else f"{n_mb / 1000:.1f} GB"


def status(stats: Stats, *, n_held: int, n_ctx: int, is_cut: bool) -> str:
    """E.g. "128 tokens, 41.2 tok/s, tau 2.6, accepted 64 %, context 9 %, cut off by max_tokens".

    n_held: tokens that the context of n_ctx holds. is_cut: whether max_tokens ended the reply.
    """
    parts = [f"{stats.n_tokens} tokens", f"{stats.tps:.1f} tok/s", f"tau {stats.tau:.1f}"]
    if stats.n_verified:
        parts.append(f"accepted {100 * stats.acceptance:.0f} %")
    else:
        parts.append("no draft verified")
    parts.append(f"context {100 * min(1.0, n_held / n_ctx):.0f} %")
    if is_cut:
        parts.append("cut off by max_tokens")
    if stats.speculation.startswith(("parked", "off", "drafter released")):
        parts.append(f"speculation {stats.speculation}")
    return ", ".join(parts)


def statistics(engine: Engine, stats: Stats | None) -> list[str]:
    """Everything there is to tell about the last reply and the engine, a line each."""
    lines = ["last reply: none yet"] if stats is None else []
    if stats is not None:
        lines += [
            f"last reply: {stats.n_tokens} tokens in {stats.n_rounds} rounds, tau {stats.tau:.2f}, "
            f"{stats.tps:.1f} tok/s, seed {stats.seed}",
            f"prompt: {stats.n_prompt} tokens, {stats.n_reused} of them in the cache already; "
            f"evaluated in {stats.prefill_s:.2f} s, first token after {stats.ttft_s:.2f} s",
            f"drafts: {stats.n_drafted} tokens proposed, {stats.n_verified} verified, "
            f"{stats.n_accepted} accepted",
            f"time: {stats.decode_s:.2f} s in rounds, of those {stats.own_s:.2f} s outside of "
            f"llama.cpp; closest draw {stats.min_margin:.3f} logits ahead",
        ]
    by_position = [f"{right}/{seen}" for right, seen in engine.acceptance_by_position if seen]
    if by_position:
        lines.append(f"right by position, all replies: {' '.join(by_position)}")
    lines.append(f"memory: {memory(engine)}")
    lines.append(f"speculation: {engine.speculation_state}")
    lines += [f"given up for now: {action.text}" for action in engine.pressure]
    return lines


def as_json(stats: Stats) -> dict[str, Any]:
    """All statistics, with the ratios made of them; a margin that is not there is None."""
    told = {name: getattr(stats, name) for name in Stats.__dataclass_fields__}
    margin = stats.min_margin if math.isfinite(stats.min_margin) else None
    ratios = {"tau": stats.tau, "tps": stats.tps, "acceptance": stats.acceptance}
    return told | {"min_margin": margin} | ratios


def coloured(pieces: Iterable[Piece], *, in_style: bool) -> list[tuple[str, str]]:
    """The tokens with the style of where they come from; without styles, drafted ones in brackets.

    A character goes with the token that completes it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    shown: list[tuple[str, str]] = []
    for token, is_drafted in pieces:
        text = decoder.decode(token)
        style = DRAFTED_STYLE if is_drafted else OWN_STYLE
        shown.append((f"[{text}]" if is_drafted and not in_style else text, style))
    shown.append((decoder.decode(b"", final=True), OWN_STYLE))
    return shown


def legend(pieces: Iterable[Piece], *, in_style: bool) -> str:
    """What the colours mean, with numbers."""
    drafted = [is_drafted for _, is_drafted in pieces]
    n_drafted = sum(drafted)
    marks = (f" ({DRAFTED_STYLE})", f" ({OWN_STYLE})") if in_style else (" [in brackets]", "")
    return (
        f"{n_drafted} tokens drafted and accepted{marks[0]}, "
        f"{len(drafted) - n_drafted} the target's own{marks[1]}"
    )
