"""The memory plan, made before anything is loaded: what a pair takes, against what there is.

Owns the order of giving up: the drafter goes first, the context is never shortened unasked, and
what still does not fit is refused. Refuses to know how the parts are estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import llama_cpp

from .. import device
from .._core import device_memory
from ..device import Gpu, Reading
from ..errors import MemoryPlanError, ModelError
from ..pressure import MAX_FLOOR_SHARE, Limits
from .gguf_header import GgufHeader, read_model
from .memory_estimate import (
    CHECKED,
    Part,
    Setting,
    drafter_parts,
    n_taps_of,
    target_parts,
)

MIN_CTX = 8  # as csrc/model_pair.cpp
MB = 1_000_000
# Tensor types that ggml's CPU code rearranges at load (ggml-cpu/repack.cpp), by instruction set.
_REPACKED_AVX2 = ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4")
_REPACKED_NEON = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4")


@dataclass(slots=True, frozen=True)
class Room:
    """What may be taken, in bytes; None: the system does not tell. is_shared: VRAM is RAM."""

    ram_bytes: int | None
    vram_bytes: int | None = None
    is_shared: bool = False

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU to plan for."""
        return self.vram_bytes is not None


@dataclass(slots=True, frozen=True)
class MemoryPlan:
    """What a target and its drafter would take, and whether there is room.

    notes: what the reader should know about the estimate.
    """

    target: list[Part]
    drafter: list[Part]
    setting: Setting
    room: Room
    notes: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """The target's parts, then the drafter's."""
        return self.target + self.drafter

    @property
    def ram_bytes(self) -> int:
        """Everything in RAM; with a GPU that shares it, everything."""
        vram = self.vram_bytes if self.room.is_shared else 0
        return vram + sum(part.ram_bytes for part in self.parts)

    @property
    def vram_bytes(self) -> int:
        """Everything on GPUs."""
        return sum(part.vram_bytes for part in self.parts)

    @property
    def shortage(self) -> str:
        """What does not fit, with numbers; "" when everything does."""
        lacks = []
        for name, need, room in (
            ("memory", self.ram_bytes, self.room.ram_bytes),
            ("GPU memory", self.vram_bytes, self.room.vram_bytes),
        ):
            if room is not None and need > room:
                lacks.append(f"{name}: {_mb(need)} needed, {_mb(room)} usable")
        return "; ".join(lacks)

    @property
    def fits(self) -> bool:
        """Whether there is room, or nobody knows how much there is."""
        return not self.shortage


def make_plan(
    target: GgufHeader, drafter: GgufHeader | None, setting: Setting, room: Room
) -> MemoryPlan:
    """The plan of one pair, or of the target alone. A pure function of its arguments."""
    setting = replace(setting, has_gpu=room.has_gpu)
    notes = [
        f"the estimate for architecture '{header.arch}' has not been checked against a load"
        for header in (target, drafter)
        if header is not None and header.arch not in CHECKED
    ]
    if room.ram_bytes is None:
        notes.append("the system does not tell how much memory is free: nothing is refused")
    return MemoryPlan(
        target=target_parts(target, setting, n_taps_of(drafter) if drafter else 0),
        drafter=drafter_parts(drafter, target, setting) if drafter else [],
        setting=setting,
        room=room,
        notes=notes,
    )


def largest_ctx(
    target: GgufHeader, drafter: GgufHeader | None, setting: Setting, room: Room
) -> int:
    """Tokens per sequence that fit at most, up to what the model was trained for; 0: none do."""
    low, high = 0, max(MIN_CTX, setting.n_ctx, target.count("context_length"))
    while low < high:
        middle = (low + high + 1) // 2
        if make_plan(target, drafter, replace(setting, n_ctx=middle), room).fits:
            low = middle
        else:
            high = middle - 1
    return low if low >= MIN_CTX else 0


def room_of(reading: Reading) -> Room:
    """What of a reading may be used: all but what the pressure policy wants to stay free."""
    limits = Limits()
    ram = reading.ram_free_bytes
    if ram is not None:
        ram = _above_floor(ram, reading.ram_total_bytes or ram, limits.min_free_ram_bytes, limits)
    if not reading.gpus or not llama_cpp.llama_supports_gpu_offload():
        return Room(ram)
    own = [gpu for gpu in reading.gpus if not gpu.is_shared]
    used: Sequence[Gpu] = own or reading.gpus  # llama.cpp leaves shared ones when it has others
    vram = sum(
        _above_floor(gpu.free_bytes, gpu.total_bytes, limits.min_free_vram_bytes, limits)
        for gpu in used
    )
    return Room(ram, vram, is_shared=not own)


def read_room() -> Room:
    """The room on this machine, now, under the cgroup limits of this process."""
    return room_of(device.read(gpu_devices=device_memory))


def repacked_types() -> frozenset[str]:
    """Tensor types of which this llama.cpp build keeps a rearranged copy on this CPU."""
    told = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
    if "REPACK = 1" not in told:
        return frozenset()
    types: set[str] = set()
    types.update(_REPACKED_AVX2 if "AVX2 = 1" in told else ())
    types.update({"Q2_K"} if "AVX512 = 1" in told else ())
    types.update(_REPACKED_NEON if "NEON = 1" in told else ())
    return frozenset(types)


def plan_load(
    target: Path | None,
    drafter: Path | None,
    *,
    setting: Setting,
    is_explicit: bool,
    room: Room | None = None,
) -> str:
    """Decides before a load: "" to go on as asked, or the reason why the drafter is left out.

    is_explicit: the drafter was asked for by name, so it is not left out but refused. room: by
    default, what this machine has now. A file whose head cannot be read is the loader's to refuse.
    Raises MemoryPlanError when the target does not fit, or an explicit drafter beside it.
    """
    if target is None or setting.n_ctx < MIN_CTX or setting.n_seq < 1:
        return ""  # nothing to read, or numbers that the loader refuses
    setting = replace(setting, repacked=repacked_types())
    room = room or read_room()
    try:
        target_head = read_model(target)
        drafter_head = read_model(drafter) if drafter else None
        pair = make_plan(target_head, drafter_head, setting, room)
    except (ModelError, ArithmeticError, TypeError, ValueError):
        return ""  # nonsense in the file: the loader says what
    if pair.fits:
        return ""
    alone = make_plan(target_head, None, setting, room)
    if not alone.fits:
        raise MemoryPlanError(_refusal(target_head, None, alone))
    if is_explicit:
        raise MemoryPlanError(_refusal(target_head, drafter_head, pair))
    taken = sum(part.ram_bytes + part.vram_bytes for part in pair.drafter)
    return (
        f"drafter {drafter.name if drafter else ''} is left out, it does not fit beside the target "
        f"({pair.shortage}; the drafter takes {_mb(taken)}): prompt lookup is used"
    )


def _refusal(target: GgufHeader, drafter: GgufHeader | None, plan: MemoryPlan) -> str:
    """One line: what, how much, the limit, the way out."""
    what = f"{target.path.name} with drafter {drafter.path.name}" if drafter else target.path.name
    n_seq, n_ctx = plan.setting.n_seq, plan.setting.n_ctx
    context = f"a context of {n_ctx}" if n_seq == 1 else f"{n_seq} contexts of {n_ctx}"
    fitting = largest_ctx(target, drafter, plan.setting, plan.room)
    if fitting:
        way_out = f"pass --ctx {fitting} (n_ctx={fitting}), the largest that fits"
        way_out += ", or leave the drafter out" if drafter else ""
    elif drafter:
        way_out = "leave the drafter out: no context leaves room for it"
    else:
        way_out = "no context is small enough: use a smaller quantisation, or free memory"
    return f"{what} and {context} do not fit into {plan.shortage}; {way_out}"


def _above_floor(free: int, total: int, min_free: int, limits: Limits) -> int:
    floor = min(max(min_free, limits.min_free_share * total), MAX_FLOOR_SHARE * total)
    return max(0, free - int(floor))


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / MB:.0f} MB"
