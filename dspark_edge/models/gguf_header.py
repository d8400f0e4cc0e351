"""The head of a GGUF file: its metadata, and the name, type, shape and place of each tensor.

The package gguf reads this too, but takes seconds over a large vocabulary, and this is read before
every load. Long lists are skipped and read when asked for. Refuses to know weights and what keys
mean.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ModelError

Value = Any  # int, float, bool, str, or a list of one of these

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG = 4096  # lists longer than this (vocabularies) are skipped
_MAX_COUNT = 1 << 24  # of keys or tensors: more is a damaged file
_MAX_DIMS = 4

# ggml's tensor types: name, values in a block, bytes of a block (ggml.h, ggml-common.h).
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(slots=True, frozen=True)
class Tensor:
    """shape: ggml's order, the contiguous dimension first. offset: from the start of the file.
    part: which file of a split model, from 1."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    part: int = 1


@dataclass(slots=True)
class GgufHeader:
    """What read_header returns. skipped: where the long lists lie, and how long they are."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: list[Tensor]
    data_offset: int
    n_file_bytes: int
    skipped: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def arch(self) -> str:
        """general.architecture; "" when the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    def of_arch(self, key: str, default: Value = None) -> Value:
        """The value of `{arch}.{key}`."""
        return self.metadata.get(f"{self.arch}.{key}", default)

    def count(self, key: str, default: int = 0) -> int:
        """A whole number of `{arch}.{key}`, the largest of a list; `default` when it is none."""
        value = self.of_arch(key)
        if isinstance(value, list):
            value = max((x for x in value if isinstance(x, int)), default=None)
        return int(value) if isinstance(value, int | float) else default

    def length(self, key: str) -> int:
        """Entries of a list, skipped or not; 0 when there is none."""
        if key in self.skipped:
            return self.skipped[key][1]
        value = self.metadata.get(key)
        return len(value) if isinstance(value, list) else 0

    def read_list(self, key: str) -> list[Value]:
        """A list, from the file if it was skipped. Raises ModelError when the file has changed."""
        if key not in self.skipped:
            value = self.metadata.get(key)
            return list(value) if isinstance(value, list) else []
        with _Reader(self.path) as reader:
            reader.at = self.skipped[key][0]
            return list(reader.array(limit=None)[0] or [])


def read_header(path: Path) -> GgufHeader:
    """Reads the head of a GGUF file (of the first part, where it is split).

    Raises ModelError when the file cannot be read, is no GGUF, or is cut short.
    """
    with _Reader(path) as reader:
        return reader.header()


def read_model(path: Path) -> GgufHeader:
    """As read_header, with the tensors of all files when the model is split into several."""
    header = read_header(path)
    n_parts = header.metadata.get("split.count", 1)
    for part in range(2, n_parts + 1 if isinstance(n_parts, int) else 1):
        name = path.name.replace(f"-00001-of-{n_parts:05d}", f"-{part:05d}-of-{n_parts:05d}")
        if name == path.name:
            raise ModelError(f"{path} is one of {n_parts} files; give the first, by its own name")
        other = read_header(path.with_name(name))
        header.tensors += [replace(tensor, part=part) for tensor in other.tensors]
        header.n_file_bytes += other.n_file_bytes
    return header


class _Reader:
    """The file mapped into memory, and a place in it."""

    __slots__ = ("_file", "_map", "at", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}; check the path") from error
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            self._file.close()
            raise ModelError(f"{path} cannot be read: it is empty or not a file") from error

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()

    def header(self) -> GgufHeader:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it starts with other bytes")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        n_tensors, n_keys = self.scalar("Q"), self.scalar("Q")
        if max(n_tensors, n_keys) > _MAX_COUNT:
            self.damaged()
        metadata: dict[str, Value] = {}
        skipped: dict[str, tuple[int, int]] = {}
        for _ in range(n_keys):
            key, kind = self.string(), self.scalar("I")
            if kind == _ARRAY:
                start = self.at
                values, n = self.array(limit=_LONG)
                if values is None:
                    skipped[key] = (start, n)
                else:
                    metadata[key] = values
            else:
                metadata[key] = self.value(kind)
        infos = [self.tensor_info() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self.damaged()
        data_offset = -(-self.at // alignment) * alignment
        tensors = [
            Tensor(name, type_, shape, data_offset + offset, n_bytes)
            for name, type_, shape, offset, n_bytes in infos
        ]
        end = max((t.offset + t.n_bytes for t in tensors), default=0)
        if end > len(self._map):
            raise ModelError(
                f"{self.path} has {len(self._map)} bytes but its tensors end at {end}; "
                "it is cut short: fetch it again"
            )
        return GgufHeader(
            self.path, version, metadata, tensors, data_offset, len(self._map), skipped
        )

    def tensor_info(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name, n_dims = self.string(), self.scalar("I")
        if n_dims > _MAX_DIMS:
            self.damaged()
        shape = tuple(self.scalar("Q") for _ in range(n_dims))
        kind, offset = self.scalar("I"), self.scalar("Q")
        if kind not in TYPES:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind}, which this version does not know"
            )
        type_, block, block_bytes = TYPES[kind]
        n_values = 1
        for n in shape:
            n_values *= n
        return name, type_, shape, offset, n_values // block * block_bytes

    def scalar(self, code: str) -> Value:
        size = struct.calcsize("<" + code)
        if self.at + size > len(self._map):
            self.damaged()
        (value,) = struct.unpack_from("<" + code, self._map, self.at)
        self.at += size
        return value

    def string(self) -> str:
        n = self.scalar("Q")
        if self.at + n > len(self._map):
            self.damaged()
        text = self._map[self.at : self.at + n]
        self.at += n
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            self.damaged()
        return self.scalar(_SCALARS[kind])

    def array(self, limit: int | None) -> tuple[list[Value] | None, int]:
        """(values, how many); no values where there are more than `limit`: they are skipped."""
        kind, n = self.scalar("I"), self.scalar("Q")
        is_long = limit is not None and n > limit
        if kind in _SCALARS:
            code = f"<{n}{_SCALARS[kind]}"
            if n > len(self._map) or self.at + struct.calcsize(code) > len(self._map):
                self.damaged()
            start, self.at = self.at, self.at + struct.calcsize(code)
            return (None if is_long else list(struct.unpack_from(code, self._map, start))), n
        if kind == _STRING and is_long:
            self.skip_strings(n)
            return None, n
        if kind != _STRING or n > len(self._map):
            self.damaged()
        return [self.string() for _ in range(n)], n

    def skip_strings(self, n: int) -> None:
        """The loop over a vocabulary: lengths only, without calls."""
        unpack, data, at = struct.Struct("<Q").unpack_from, self._map, self.at
        try:
            for _ in range(n):
                at += 8 + unpack(data, at)[0]
        except struct.error:
            self.damaged()
        if at > len(data):
            self.damaged()
        self.at = at

    def damaged(self) -> None:
        raise ModelError(f"{self.path} is damaged or cut short near byte {self.at}; fetch it again")
