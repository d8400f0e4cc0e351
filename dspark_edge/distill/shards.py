"""Sampled sequences on disk: float16 shards, an index of them, a limit, safe against a kill.

A shard counts once its line is in the index; what a kill left half done is removed. Refuses to know
where sequences come from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

INDEX_FILE = "index.jsonl"
SHARD_BYTES = 48 << 20  # of one shard: two of them fit into any memory
RESERVE_BYTES = 1 << 30  # of the disk, left to others

Half = npt.NDArray[np.float16]
Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Sampled:
    """A prompt and the target's reply, with what the target saw.

    tokens [n], the first n_prompt of them the prompt. features [n - 1, n_feature]: of all tokens
    but the last, which nothing was evaluated behind. Per reply token: hidden [n_reply, n_embd] in
    front of the head, log_sum_exp [n_reply] of the logits, likely [n_reply, n_likely] token ids.
    """

    number: int
    temperature: float
    n_prompt: int
    tokens: Ints
    features: Half
    hidden: Half
    log_sum_exp: npt.NDArray[np.float32]
    likely: Ints

    @property
    def n_reply(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_bytes(self) -> int:
        """What it takes on disk."""
        arrays = (self.tokens, self.features, self.hidden, self.log_sum_exp, self.likely)
        return sum(a.nbytes for a in arrays)


@dataclass(slots=True, frozen=True)
class Text:
    """A prompt and the target's reply, as tokens [n] alone: a thousandth of what Sampled holds."""

    number: int
    temperature: float
    n_prompt: int
    tokens: Ints


@dataclass(slots=True, frozen=True)
class Shard:
    """A line of the index. numbers: of its sequences."""

    name: str
    numbers: tuple[int, ...]
    n_tokens: int
    n_bytes: int


class ShardStore:
    """The shards of one folder. limit_bytes: what they may take together."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Raises OSError (no such folder can be made, too little disk)."""
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < RESERVE_BYTES:
            raise OSError(
                f"{folder} has {free >> 20} MB of disk left; at least {RESERVE_BYTES >> 20} MB "
                "are needed: free some, or give another --work"
            )
        self._folder = folder
        self._limit_bytes = limit_bytes
        self.shards = self._read_index()
        self._remove_strays()
        self._waiting: list[Sampled] = []

    @property
    def numbers(self) -> set[int]:
        """Of all stored sequences."""
        return {number for shard in self.shards for number in shard.numbers}

    @property
    def n_tokens(self) -> int:
        """Reply tokens stored."""
        return sum(shard.n_tokens for shard in self.shards)

    @property
    def is_full(self) -> bool:
        """Whether another shard would pass the limit, or what the disk has."""
        used = sum(shard.n_bytes for shard in self.shards)
        free = shutil.disk_usage(self._folder).free
        return used + SHARD_BYTES > self._limit_bytes or free < RESERVE_BYTES

    def add(self, sampled: Sampled) -> bool:
        """Take a sequence; True when a shard was written."""
        self._waiting.append(sampled)
        if sum(each.n_bytes for each in self._waiting) < SHARD_BYTES:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write what waits as a shard."""
        if not self._waiting:
            return
        sequences, self._waiting = self._waiting, []
        name = f"shard-{len(self.shards):05}.npz"
        with _replacing(self._folder / name) as file:
            _save(file, sequences)
        shard = Shard(
            name,
            tuple(each.number for each in sequences),
            sum(each.n_reply for each in sequences),
            sum(each.n_bytes for each in sequences),
        )
        line = asdict(shard)
        with (self._folder / INDEX_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.shards.append(shard)

    def read(self, shard: Shard) -> list[Sampled]:
        """Its sequences, in memory."""
        with np.load(self._folder / shard.name) as arrays:
            return list(_parted({key: arrays[key] for key in arrays.files}))

    def read_texts(self, shard: Shard) -> list[Text]:
        """Its sequences without what the target saw, which is not read from disk either."""
        with np.load(self._folder / shard.name) as arrays:
            ends = np.cumsum(arrays["n"])
            texts = np.split(arrays["tokens"], ends[:-1])
            heads = (arrays[key].tolist() for key in ("number", "temperature", "n_prompt"))
            return [Text(*each) for each in zip(*heads, texts, strict=True)]

    def _read_index(self) -> list[Shard]:
        path = self._folder / INDEX_FILE
        if not path.exists():
            return []
        shards: list[Shard] = []
        whole = ""
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                row = json.loads(line)
            except ValueError:  # the line that a kill cut
                break
            shards.append(
                Shard(row["name"], tuple(row["numbers"]), row["n_tokens"], row["n_bytes"])
            )
            whole += line.rstrip("\n") + "\n"
        with _replacing(path) as file:
            file.write(whole.encode())
        return shards

    def _remove_strays(self) -> None:
        known = {shard.name for shard in self.shards}
        for path in self._folder.glob("shard-*"):
            if path.name not in known:
                path.unlink()


class _replacing:  # noqa: N801  # reads as a verb where it is used
    """A file that appears under its name only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        self._file = self._temporary.open("wb")
        return self._file

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self._path)


def _save(file: IO[bytes], sequences: list[Sampled]) -> None:
    """All sequences one after the other, with what parts them again."""
    np.savez(
        file,
        number=np.array([s.number for s in sequences], np.int64),
        temperature=np.array([s.temperature for s in sequences], np.float32),
        n_prompt=np.array([s.n_prompt for s in sequences], np.int64),
        n=np.array([len(s.tokens) for s in sequences], np.int64),
        tokens=np.concatenate([s.tokens for s in sequences]),
        features=np.concatenate([s.features for s in sequences]),
        hidden=np.concatenate([s.hidden for s in sequences]),
        log_sum_exp=np.concatenate([s.log_sum_exp for s in sequences]),
        likely=np.concatenate([s.likely for s in sequences]),
    )


def _parted(arrays: dict[str, npt.NDArray[np.generic]]) -> Iterator[Sampled]:
    token, feature, reply = 0, 0, 0
    for i, length in enumerate(arrays["n"].tolist()):
        n, n_prompt = int(length), int(arrays["n_prompt"][i])
        n_reply = n - n_prompt
        yield Sampled(
            number=int(arrays["number"][i]),
            temperature=float(arrays["temperature"][i]),
            n_prompt=n_prompt,
            tokens=arrays["tokens"][token : token + n].astype(np.int32, copy=False),
            features=arrays["features"][feature : feature + n - 1].astype(np.float16, copy=False),
            hidden=arrays["hidden"][reply : reply + n_reply].astype(np.float16, copy=False),
            log_sum_exp=arrays["log_sum_exp"][reply : reply + n_reply].astype(
                np.float32, copy=False
            ),
            likely=arrays["likely"][reply : reply + n_reply].astype(np.int32, copy=False),
        )
        token, feature, reply = token + n, feature + n - 1, reply + n_reply
