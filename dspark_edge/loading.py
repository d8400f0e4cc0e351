"""Loads a target with its drafter, and decides what can speculate; says what it decided and why.

Refuses to know requests and rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import platformdirs
import psutil

from ._core import BlockDecoder, DecoderConfig, DrafterFile, device_memory
from .calibration import Calibration, load_calibration
from .cost import CostTable, load_cached, profile, save_cached
from .errors import PairError
from .files import fingerprint
from .governor import Governor
from .models import find_drafter, target_path
from .models.memory_estimate import Setting
from .models.memory_plan import plan_load
from .pressure import Limits
from .speculation import Mode, Proposer, Speculation

if TYPE_CHECKING:
    from llama_cpp import Llama

MAX_THREADS = 512
LOOKUP_LEN = 8  # draft tokens of a lookup at most
PROFILE_DEPTH = 256  # tokens in the cache while profiling
PROFILE_WIDTH = 32  # widest pass that is profiled


@dataclass(slots=True, frozen=True)
class Identity:
    """Which files an engine runs, name and fingerprint each; "" for what there is none of."""

    target: str = ""
    drafter: str = ""
    calibration: str = ""


@dataclass(slots=True)
class Loaded:
    """A decoder, the speculation that goes with it, and what to tell the user.

    governor: what acts on pressure; None: nothing does.
    """

    decoder: BlockDecoder
    speculation: Speculation
    target_name: str
    drafter_name: str
    notices: list[str] = field(default_factory=list)
    keep_alive: object = None  # the borrowed model's owner
    governor: Governor | None = None
    identity: Identity = Identity()
    device_name: str = ""


@dataclass(slots=True)
class _Choice:
    """What should speculate, before the target is loaded."""

    proposer: Proposer | None
    drafter: Path | None = None
    reason: str = ""  # why nothing speculates
    n_max: int = 0
    notices: list[str] = field(default_factory=list)


def load(
    target: str | Path | Llama,
    *,
    drafter: str | Path | None,
    n_ctx: int,
    n_seq: int,
    n_gpu_layers: int,
    n_threads: int | None,
    speculation: Mode,
    verify_len: int | None,
    cost_cache: Path | None,
    limits: Limits | None = None,
) -> Loaded:
    """Loads everything an Engine needs; its docstring has the parameters and errors."""
    if speculation not in ("auto", "always", "off"):
        raise ValueError(f"speculation is {speculation!r}; it must be auto, always or off")
    if verify_len is not None and (speculation != "always" or verify_len < 0):
        raise ValueError(
            f'verify_len is {verify_len}; it must be 0 or more, with speculation="always"'
        )
    for name, number in (("n_ctx", n_ctx), ("n_seq", n_seq), ("n_gpu_layers", n_gpu_layers)):
        if not isinstance(number, int) or not -1 <= number < 2**31:
            raise ValueError(f"{name} is {number!r}; it must be a whole number from -1 to 2^31 - 1")
    if n_threads is not None and not 0 <= n_threads <= MAX_THREADS:
        raise ValueError(f"n_threads is {n_threads}; it must be 1 to {MAX_THREADS}, or 0 for all")
    path, address = _target_of(target)
    threads = n_threads if n_threads is not None else default_threads()

    def decoder_for(choice: _Choice) -> BlockDecoder:
        n_max = _n_verified(choice, speculation)
        return BlockDecoder(
            DecoderConfig(
                target_path="" if address else str(path),
                target_address=address,
                drafter_path=str(choice.drafter or ""),
                n_ctx=n_ctx,
                n_seq=n_seq,
                n_batch=max(512, n_seq * (1 + n_max)),
                n_threads=threads,
                n_gpu_layers=n_gpu_layers,
                max_verify_len=n_max,
                target_id=_identity(path),
                drafter_id=_identity(choice.drafter),
            )
        )

    choice = _choose(path, drafter, speculation)
    setting = Setting(
        n_ctx=n_ctx,
        n_seq=n_seq,
        max_verify_len=_n_verified(choice, speculation),
        n_gpu_layers=n_gpu_layers,
        is_loaded=bool(address),
    )
    left_out = plan_load(path, choice.drafter, setting=setting, is_explicit=drafter != "auto")
    if left_out:
        choice = _lookup(left_out)
    try:
        decoder = decoder_for(choice)
    except PairError as error:
        if drafter != "auto":
            raise
        choice = _lookup(f"drafter {choice.drafter} is not used: {error}")
        decoder = decoder_for(choice)
    reason = decoder.no_roll_back_reason
    if not reason and decoder.is_recurrent and n_seq > 1:
        # Tried with LFM2: rolled back states of several sequences at once went wrong in a few
        # texts of a hundred; with one sequence none did.
        reason = "recurrent states are rolled back reliably for one sequence only; pass n_seq=1"
    if choice.proposer is not None and reason:
        choice.proposer, choice.reason = None, reason
        choice.notices.append(f"speculation off: {choice.reason}")
    if n_ctx > decoder.n_ctx_train:
        choice.notices.append(
            f"n_ctx is {n_ctx} but the model was trained for {decoder.n_ctx_train} tokens; "
            "long texts may degrade"
        )
    cost = CostTable()
    if choice.proposer is not None and speculation == "auto":
        key = _cost_key(path, choice, threads, n_gpu_layers, n_seq)
        cost = _cost_table(decoder, key, cost_cache, choice)
    calibration = _calibration(choice)
    proposals = Speculation(
        mode=speculation,
        proposer=choice.proposer,
        off_reason=choice.reason,
        drafter=decoder,
        cost=cost,
        n_max=choice.n_max,
        verify_len=verify_len,
        n_lookup=LOOKUP_LEN,
        survival=calibration.survival if calibration else None,
        typical=calibration.typical if calibration else (),
    )
    return Loaded(
        decoder=decoder,
        speculation=proposals,
        target_name=path.name if path else decoder.metadata("general.name"),
        drafter_name=choice.drafter.name if choice.drafter else choice.proposer or "none",
        notices=choice.notices,
        keep_alive=target if address else None,
        governor=None if limits is None else Governor(decoder, proposals, limits),
        identity=Identity(
            target=_identity(path),
            drafter=_identity(choice.drafter),
            calibration=_calibration_identity(calibration),
        ),
        device_name=_device_name(threads, n_gpu_layers),
    )


def _identity(path: Path | None) -> str:
    """Name and fingerprint; "" without a file, and for one that loading will find unreadable."""
    if path is None:
        return ""
    try:
        return f"{path.name} {fingerprint(path)}"
    except OSError:
        return ""


def _calibration_identity(calibration: Calibration | None) -> str:
    if calibration is None:
        return ""
    text = json.dumps(calibration.survival.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _n_verified(choice: _Choice, mode: Mode) -> int:
    """Draft tokens per sequence at most: in mode "auto" lookup goes on beside a drafter."""
    return max(choice.n_max, LOOKUP_LEN) if choice.proposer and mode == "auto" else choice.n_max


def _calibration(choice: _Choice) -> Calibration | None:
    if choice.drafter is None:
        return None
    return load_calibration(choice.drafter, n_slots=max(choice.n_max, LOOKUP_LEN))


def _target_of(target: str | Path | Llama) -> tuple[Path | None, int]:
    """The target's file and, for a llama_cpp.Llama, the address of its model."""
    if isinstance(target, str | Path):
        return target_path(target), 0
    if not isinstance(target, llama_cpp.Llama):
        raise ValueError(
            f"target is a {type(target).__name__}; give a path, 'default' or a llama_cpp.Llama"
        )
    path = Path(target.model_path)
    return (path if path.is_file() else None), int(target.model)


def _choose(path: Path | None, drafter: str | Path | None, mode: Mode) -> _Choice:
    if mode == "off":
        return _Choice(None, reason='speculation="off" was asked for')
    if drafter is None:
        return _Choice(None, reason="no drafter was asked for")
    if drafter == "lookup":
        return _lookup()
    if drafter == "auto":
        found = find_drafter(path) if path else None
        if found is None:
            return _lookup("no drafter belongs to this target: prompt lookup is used")
        try:
            return _with_drafter(found)
        except PairError as error:
            return _lookup(str(error))
    return _with_drafter(Path(drafter).expanduser())


def _with_drafter(drafter: Path) -> _Choice:
    return _Choice("drafter", drafter=drafter, n_max=DrafterFile(str(drafter)).n_draft)


def _lookup(*notices: str) -> _Choice:
    return _Choice("lookup", n_max=LOOKUP_LEN, notices=list(notices))


def default_threads() -> int:
    """The physical cores that this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return max(1, min(physical, len(os.sched_getaffinity(0))))
    return physical


def _device_name(n_threads: int, n_gpu_layers: int) -> str:
    cpu = f"CPU, {n_threads or os.cpu_count() or 1} thread{'s' if n_threads != 1 else ''}"
    gpus = [device.name for device in device_memory() if device.kind != "cpu"]
    if not gpus or n_gpu_layers == 0:
        return cpu
    layers = "all layers" if n_gpu_layers < 0 else f"{n_gpu_layers} layers"
    return f"{', '.join(gpus)} ({layers}); {cpu}"


def _cost_table(
    decoder: BlockDecoder, key: str, cost_cache: Path | None, choice: _Choice
) -> CostTable:
    """From the cache, or measured now (a few seconds) and kept there."""
    folder = cost_cache or Path(platformdirs.user_cache_dir("dspark_edge", appauthor=False))
    file = folder / f"cost-{key[:16]}.json"
    table = load_cached(file, key)
    if table is None:
        has_drafter = choice.proposer == "drafter"
        widest = decoder.n_seq * (1 + _n_verified(choice, "auto"))
        max_width = min(PROFILE_WIDTH, widest, decoder.n_ctx)
        table = profile(
            decoder.time_step,
            decoder.time_draft if has_drafter else None,
            max_width=max_width,
            n_seq=decoder.n_seq,
            depth=min(PROFILE_DEPTH, decoder.n_ctx - max_width),
        )
        if table.is_noisy:
            choice.notices.append("the machine was busy while passes were timed: not kept")
        elif not save_cached(file, key, table):
            choice.notices.append(f"the cost table cannot be kept in {folder}; measured each time")
    return table


def _cost_key(
    path: Path | None, choice: _Choice, threads: int, n_gpu_layers: int, n_seq: int
) -> str:
    parts = [
        fingerprint(path) if path else "",
        fingerprint(choice.drafter) if choice.drafter else "",
        str(choice.proposer),
        llama_cpp.__version__,
        llama_cpp.llama_print_system_info().decode("utf-8", errors="replace"),
        *(device.name for device in device_memory()),
        f"threads {threads} gpu layers {n_gpu_layers} sequences {n_seq} slots {choice.n_max}",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
