"""Loads a target with what was chosen to speculate, as far as memory and the pair allow; says why.

Owns the order: plan the memory, make the decoder, know the costs. Refuses to know requests and
rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import psutil

from ._core import BlockDecoder, DecoderConfig, LookupCache, device_memory
from .calibration import Calibration, load_calibration
from .choice import Choice, choose, lookup
from .cost import CostTable
from .cost_cache import cost_table
from .errors import PairError
from .files import fingerprint
from .governor import Governor
from .lookup_cache import load_lookup_texts
from .models import target_path
from .models.memory_estimate import MIN_BATCH, Setting
from .models.memory_plan import plan_load
from .pressure import Limits
from .speculation import Mode, Speculation

if TYPE_CHECKING:
    from llama_cpp import Llama

Progress = Callable[[float], bool]  # gets 0..1 of the weights; False ends the loading
MAX_THREADS = 512


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


@dataclass(slots=True, frozen=True)
class _Asked:
    """What is to be loaded. path: the target's file; address: of a model that is there already."""

    path: Path | None
    address: int
    mode: Mode
    n_ctx: int
    n_seq: int
    n_gpu_layers: int
    n_threads: int
    progress: Progress | None


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
    progress: Progress | None = None,
) -> Loaded:
    """Loads everything an Engine needs; its docstring has the parameters and errors.

    progress: called in this thread while weights are read, those of target and drafter together;
    loading that it ends raises ModelError or PairError. A drafter that turns out not to fit starts
    it anew, for the target alone.
    """
    _check_mode(speculation, verify_len)
    if limits is not None and not isinstance(limits, Limits):
        raise ValueError(f"limits is {limits!r}; give a dspark_edge.Limits, or None")
    _check_numbers({"n_ctx": n_ctx, "n_seq": n_seq, "n_gpu_layers": n_gpu_layers}, n_threads)
    path, address = _target_of(target)
    threads = n_threads if n_threads is not None else default_threads()
    asked = _Asked(path, address, speculation, n_ctx, n_seq, n_gpu_layers, threads, progress)
    choice = _within_memory(asked, choose(path, drafter, speculation), drafter)
    decoder, choice = _open(asked, choice, drafter)
    _note_limits(asked, choice, decoder)
    cost = CostTable()
    if choice.proposer is not None and speculation == "auto":
        cost = cost_table(
            decoder,
            choice,
            target=asked.path,
            setting=f"threads {asked.n_threads} gpu layers {asked.n_gpu_layers}",
            folder=cost_cache,
        )
    calibration = _calibration(choice)
    texts = _lookup_cache(choice, decoder)
    proposals = Speculation(
        mode=speculation,
        proposer=choice.proposer,
        off_reason=choice.reason,
        drafter=decoder,
        cost=cost,
        n_max=choice.n_max,
        verify_len=verify_len,
        n_lookup=choice.n_lookup,
        survival=calibration.survival if calibration else None,
        typical=calibration.typical if calibration else (),
        lookup_cache=texts,
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


def default_threads() -> int:
    """The physical cores that this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return max(1, min(physical, len(os.sched_getaffinity(0))))
    return physical


# ---------------------------------------------------------------- what is asked for


def _check_mode(mode: Mode, verify_len: int | None) -> None:
    if mode not in ("auto", "always", "off"):
        raise ValueError(f"speculation is {mode!r}; it must be auto, always or off")
    if verify_len is not None and (mode != "always" or verify_len < 0):
        raise ValueError(
            f'verify_len is {verify_len}; it must be 0 or more, with speculation="always"'
        )


def _check_numbers(numbers: Mapping[str, int], n_threads: int | None) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or not -1 <= number < 2**31:
            raise ValueError(f"{name} is {number!r}; it must be a whole number from -1 to 2^31 - 1")
    is_number = isinstance(n_threads, int)
    if n_threads is not None and not (is_number and 0 <= n_threads <= MAX_THREADS):
        raise ValueError(f"n_threads is {n_threads!r}; it must be 1 to {MAX_THREADS}, or 0 for all")


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


# ---------------------------------------------------------------- the decoder


def _within_memory(asked: _Asked, choice: Choice, drafter: str | Path | None) -> Choice:
    """The choice, or lookup where there is no room for its drafter. Raises MemoryPlanError."""
    setting = Setting(
        n_ctx=asked.n_ctx,
        n_seq=asked.n_seq,
        max_verify_len=choice.n_verified(asked.mode),
        n_gpu_layers=asked.n_gpu_layers,
        is_loaded=bool(asked.address),
    )
    left_out = plan_load(asked.path, choice.drafter, setting=setting, is_explicit=drafter != "auto")
    return lookup(left_out, n_lookup=choice.n_lookup, fits=choice.fits) if left_out else choice


def _open(asked: _Asked, choice: Choice, drafter: str | Path | None) -> tuple[BlockDecoder, Choice]:
    """The decoder, with lookup where the drafter that was found does not fit the target."""
    try:
        return _decoder(asked, choice), choice
    except PairError as error:
        if drafter != "auto":
            raise
        notice = f"drafter {choice.drafter} is not used: {error}"
        choice = lookup(notice, n_lookup=choice.n_lookup)
        return _decoder(asked, choice), choice


def _decoder(asked: _Asked, choice: Choice) -> BlockDecoder:
    n_max = choice.n_verified(asked.mode)
    return BlockDecoder(
        DecoderConfig(
            target_path="" if asked.address else str(asked.path),
            target_address=asked.address,
            drafter_path=str(choice.drafter or ""),
            n_ctx=asked.n_ctx,
            n_seq=asked.n_seq,
            n_batch=max(MIN_BATCH, asked.n_seq * (1 + n_max)),
            n_threads=asked.n_threads,
            n_gpu_layers=asked.n_gpu_layers,
            max_verify_len=n_max,
            target_id=_identity(asked.path),
            drafter_id=_identity(choice.drafter),
        ),
        asked.progress,
    )


def _note_limits(asked: _Asked, choice: Choice, decoder: BlockDecoder) -> None:
    """What the target itself does not allow, or not well: into the choice and its notices."""
    reason = decoder.no_roll_back_reason
    if not reason and decoder.is_recurrent and asked.n_seq > 1:
        # Tried with LFM2: rolled back states of several sequences at once went wrong in a few
        # texts of a hundred; with one sequence none did.
        reason = "recurrent states are rolled back reliably for one sequence only; pass n_seq=1"
    if choice.proposer is not None and reason:
        choice.proposer, choice.reason, choice.fits = None, reason, None
        choice.notices.append(f"speculation off: {choice.reason}")
    if asked.n_ctx > decoder.n_ctx_train:
        choice.notices.append(
            f"n_ctx is {asked.n_ctx} but the model was trained for {decoder.n_ctx_train} tokens; "
            "long texts may degrade"
        )


# ---------------------------------------------------------------- names


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


def _device_name(n_threads: int, n_gpu_layers: int) -> str:
    cpu = f"CPU, {n_threads or os.cpu_count() or 1} thread{'s' if n_threads != 1 else ''}"
    gpus = [device.name for device in device_memory() if device.kind != "cpu"]
    if not gpus or n_gpu_layers == 0:
        return cpu
    layers = "all layers" if n_gpu_layers < 0 else f"{n_gpu_layers} layers"
    return f"{', '.join(gpus)} ({layers}); {cpu}"


def _calibration(choice: Choice) -> Calibration | None:
    if choice.fits is None:
        return None
    n_slots = max(choice.n_max, choice.n_lookup)
    return load_calibration(choice.fits, n_slots=n_slots, notices=choice.notices)


def _lookup_cache(choice: Choice, decoder: BlockDecoder) -> LookupCache | None:
    if choice.fits is None:
        return None
    texts = load_lookup_texts(choice.fits, n_vocab=decoder.n_vocab, notices=choice.notices)
    return None if texts is None else LookupCache(texts.tokens, texts.lengths)
