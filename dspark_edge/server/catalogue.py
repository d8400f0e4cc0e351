"""Which models can be asked for: the one given at the start, those in the models folders, and the
catalogue's targets that lie on this disk.

Looks at the disk each time, so files may come and go. Refuses to know what is in a file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import ModelError
from ..models import target_path
from ..models.catalogue import catalogue
from ..models.pairing import DRAFTER_PATTERNS, files_of
from .errors import ApiError

NO_TARGETS = (*DRAFTER_PATTERNS, "mmproj*.gguf", "*-of-?????.gguf")
FIRST_PART = "*-00001-of-?????.gguf"


@dataclass(slots=True, frozen=True)
class Entry:
    """A model file by the name that requests use."""

    id: str
    path: Path

    @property
    def is_there(self) -> bool:
        """Whether the file still is."""
        return self.path.is_file()

    def size_and_time(self) -> tuple[int, float]:
        """Bytes, and when it was changed; zeros for a file that is gone."""
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0.0
        return found.st_size, found.st_mtime


class Catalogue(Protocol):
    """Where the server looks models up; called from worker threads."""

    @property
    def default(self) -> Entry: ...
    def entries(self) -> list[Entry]: ...
    def find(self, name: str | None) -> Entry: ...


class FolderCatalogue:
    """The default model, those in folders, then the catalogue's under their names there."""

    __slots__ = ("_folders", "default")

    def __init__(self, model: str, folders: tuple[Path, ...]) -> None:
        """Raises ModelError when the default model or a folder is not there."""
        path = target_path(model).absolute()
        self.default = Entry(path.stem, path)
        missing = next((folder for folder in folders if not folder.is_dir()), None)
        if missing is not None:
            raise ModelError(f"models folder {missing} is not a folder; check --models-dir")
        self._folders = folders

    def entries(self) -> list[Entry]:
        """Every model that is on disk now; of two with one name the first."""
        found: dict[str, Entry] = {}
        paths = set()
        for entry in (*(Entry(path.stem, path) for path in self._paths()), *_on_disk()):
            if entry.is_there and entry.path not in paths:
                paths.add(entry.path)
                found.setdefault(entry.id, entry)
        return list(found.values())

    def find(self, name: str | None) -> Entry:
        """The model of a name; None and "default" mean the one given at the start.

        Raises ApiError (404).
        """
        entries = self.entries()
        wanted = self.default.id if name in (None, "default") else name
        entry = next((entry for entry in entries if entry.id == wanted), None)
        if entry is None:
            known = ", ".join(entry.id for entry in entries[:20]) or "none"
            gone = (
                f"; its file {self.default.path.name} is gone" if wanted == self.default.id else ""
            )
            raise ApiError(
                404,
                f"model {wanted!r:.100} is not here{gone}; there is: {known}",
                code="model_not_found",
                param="model",
            )
        return entry

    def _paths(self) -> Iterator[Path]:
        yield self.default.path
        for folder in self._folders:
            for path in sorted(folder.glob("*.gguf")):
                is_no_target = any(fnmatch.fnmatch(path.name, p) for p in NO_TARGETS)
                if not is_no_target or fnmatch.fnmatch(path.name, FIRST_PART):
                    yield path.absolute()


def _on_disk() -> Iterator[Entry]:
    """The catalogue's targets of which a file is here."""
    for known in catalogue().entries:
        path = next(files_of(known), None) if known.role == "target" else None
        if path is not None:
            yield Entry(known.name, path.absolute())
