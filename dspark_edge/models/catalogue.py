"""The catalogue: which targets and drafters are known, from models/catalogue.toml.

Refuses to know which of them lie on this disk (pairing.py) and how they are fetched (pull.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ModelError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Role = Literal["target", "drafter"]


@dataclass(slots=True, frozen=True, kw_only=True)
class Entry:
    """One model. files: name patterns, the preferred one first. target: a drafter's target.

    thinking: how the target is to be used with its drafters (none: it has no such mode). tried: by
    this project, how; "" when it never was.
    """

    name: str
    role: Role
    repo: str = ""
    package: str = ""
    files: tuple[str, ...] = ("*.gguf",)
    licence: str = "not checked; see its page"
    thinking: str = "not known"
    tried: str = ""
    note: str = ""
    target: str = ""
    kind: str = ""
    form: str = "gguf"

    @property
    def remarks(self) -> str:
        """What a user should know, in one line; says so when the entry has never been tried."""
        parts = [f"tried {self.tried}" if self.tried else "never tried by this project"]
        if self.form != "gguf":
            parts.append("must be converted to GGUF first")
        if self.thinking in ("on", "off"):
            parts.append(f"thinking {self.thinking}")
        return "; ".join(parts + ([self.note] if self.note else []))


@dataclass(slots=True, frozen=True)
class Catalogue:
    """All entries, and the name of the default target."""

    default: str
    entries: tuple[Entry, ...]

    def find(self, name: str) -> Entry | None:
        """The entry of that name, whatever its case."""
        return next((e for e in self.entries if e.name.lower() == name.lower()), None)

    def drafters_of(self, target: str) -> list[Entry]:
        """A target's drafters, ready ones first."""
        found = [e for e in self.entries if e.role == "drafter" and e.target == target]
        return sorted(found, key=lambda e: e.form != "gguf")

    def targets(self) -> list[Entry]:
        """All targets, in the order of the file."""
        return [e for e in self.entries if e.role == "target"]


def models_folder() -> Path:
    """The folder of our own drafters: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_models"
    return installed if installed.is_dir() else package.parent / "models"


def catalogue() -> Catalogue:
    """The catalogue that comes with the package."""
    return read_catalogue(models_folder() / "catalogue.toml")


def read_catalogue(path: Path) -> Catalogue:
    """Reads a catalogue. Raises ModelError when it is missing or wrong, naming the entry."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"catalogue {path} cannot be read: {error}; reinstall it") from error
    entries = [_entry(path, "target", table) for table in data.get("target", [])]
    entries += [_entry(path, "drafter", table) for table in data.get("drafter", [])]
    names = [entry.name for entry in entries]
    targets = {entry.name for entry in entries if entry.role == "target"}
    for entry in entries:
        if names.count(entry.name) > 1:
            raise ModelError(f"catalogue {path}: {entry.name} is there twice")
        if entry.role == "drafter" and entry.target not in targets:
            raise ModelError(f"catalogue {path}: {entry.name} is for {entry.target!r}, no target")
    default = str(data.get("default", ""))
    if default not in targets:
        raise ModelError(f"catalogue {path}: default is {default!r}, which is no target")
    return Catalogue(default, tuple(entries))


def _entry(path: Path, role: Role, table: Mapping[str, object]) -> Entry:
    known = set(Entry.__dataclass_fields__) - {"role"}
    unknown = sorted(set(table) - known)
    if "name" not in table or unknown:
        what = f"{unknown[0]!r} is no field" if unknown else "name is missing"
        raise ModelError(f"catalogue {path}: entry {table.get('name', '?')}: {what}")
    texts = {key: str(value) for key, value in table.items() if key != "files"}
    files = table.get("files", ["*.gguf"])
    patterns = tuple(str(file) for file in files) if isinstance(files, list) else (str(files),)
    return Entry(role=role, files=patterns, **texts)
