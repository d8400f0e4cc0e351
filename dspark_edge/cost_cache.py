"""Cost tables on disk: read where one is there and still right, measured and kept where none is.

Owns the files, their key, and the doubt whether a table tells of this machine or of a busy moment.
Refuses to know what is decided by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import platformdirs

from ._core import BlockDecoder, device_memory
from .choice import Choice
from .cost import CostTable, profile
from .files import fingerprint, write_atomically
from .others import Others

DRAFT_PASS = "host chain"  # how drafts are made: tables timed before that was so are timed anew
PROFILE_DEPTH = 256  # tokens in the cache while profiling
PROFILE_WIDTH = 32  # widest pass that is profiled
OTHERS_SHARE_MAX = 0.1  # of the processors' time; with more a profile is not kept
CHECKED_WIDTHS = (1, 4)
OUTDATED_RATIO = 1.4  # of a kept time to one taken now; above, it was a busy moment that was kept


def cost_table(
    decoder: BlockDecoder,
    choice: Choice,
    *,
    target: Path | None,
    setting: str,
    folder: Path | None,
) -> CostTable:
    """From the cache, or measured now (a few seconds) and kept there.

    All sequences must be closed. target: the file, None where there is none. setting: what else
    changes the cost. folder: None for the user's. Appends to choice.notices.
    """
    folder = folder or Path(platformdirs.user_cache_dir("dspark_edge", appauthor=False))
    key = _key(decoder, choice, target, setting)
    file = folder / f"cost-{key[:16]}.json"
    table = load_cached(file, key)
    if table is not None and not is_outdated(table, decoder.time_step):
        return table
    others = Others()
    table = _profile(decoder, choice)
    if table.is_noisy or others.share() > OTHERS_SHARE_MAX:
        choice.notices.append("the machine was busy while passes were timed: not kept")
    elif not save_cached(file, key, table):
        choice.notices.append(f"the cost table cannot be kept in {folder}; measured each time")
    return table


def is_outdated(table: CostTable, time_step: Callable[[int, int], float]) -> bool:
    """Whether passes take much less than the table says.

    Other programs only ever add time: then it was measured in a busier moment, and what was added
    differs from width to width. A table that says less is right, and this moment is the busy one.
    """
    time_step(1, 0)  # the first pass of a context takes longer
    return any(
        table.verify_s(width, 0) > OUTDATED_RATIO * time_step(width, 0)
        for width in CHECKED_WIDTHS
        if width <= table.widest
    )


def load_cached(path: Path, key: str) -> CostTable | None:
    """The table saved under this key; None when missing, unreadable, corrupt or of another key."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.get("key") != key:
            return None
        return CostTable.from_json(saved.get("table"))
    except (OSError, ValueError, RecursionError):  # ValueError: bad JSON, bad UTF-8, bad table
        return None


def save_cached(path: Path, key: str, table: CostTable) -> bool:
    """Write the table atomically; False when the place is not writable."""
    text = json.dumps({"key": key, "table": table.to_json()})
    return write_atomically(path, text)


def _profile(decoder: BlockDecoder, choice: Choice) -> CostTable:
    max_width = _max_width(decoder, choice)
    return profile(
        decoder.time_step,
        decoder.time_draft if choice.proposer == "drafter" else None,
        max_width=max_width,
        n_seq=decoder.n_seq,
        depth=min(PROFILE_DEPTH, decoder.n_ctx - max_width),
    )


def _max_width(decoder: BlockDecoder, choice: Choice) -> int:
    return min(PROFILE_WIDTH, decoder.n_seq * (1 + choice.n_verified("auto")), decoder.n_ctx)


def _key(decoder: BlockDecoder, choice: Choice, target: Path | None, setting: str) -> str:
    parts = [
        fingerprint(target) if target else "",
        fingerprint(choice.drafter) if choice.drafter else "",
        str(choice.proposer),
        DRAFT_PASS,
        llama_cpp.__version__,
        llama_cpp.llama_print_system_info().decode("utf-8", errors="replace"),
        *(f"{device.name} {device.description}" for device in device_memory()),
        f"{setting} sequences {decoder.n_seq} slots {choice.n_max}",
        f"widths to {_max_width(decoder, choice)}",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
