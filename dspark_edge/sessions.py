"""Conversations kept on disk: a folder for each, with its text and, if wanted, both KV states.

Owns the folder and the order of writing: the KV file first, then the session's file, which names
it, in one step. A process that dies at any moment leaves the old session or the new one. Refuses to
know what is in a KV file: the engine takes it or says why not, and the text is always enough.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from .errors import DsparkError, SessionError
from .files import TEMPORARY, flush_folder, replace_file
from .session_file import KvFile, Session, Stored, session_of, session_text

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Restored", "Session", "SessionInfo", "SessionStore", "check_name"]

MAX_NAME_CHARS, MAX_NAME_BYTES = 64, 200  # file systems hold 255 bytes
TEXT_FILE = "session.json"
KV_NAME = re.compile(r"kv-[0-9a-f]{16}\.bin")
DELETED = ".deleted-"  # begins the name of a session on its way out
STALE_S = 600.0  # a temporary file that nobody has written to for so long has no writer
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # on Windows


@dataclass(slots=True, frozen=True)
class SessionInfo:
    """One line of a list.

    saved_at: seconds since the epoch. n_bytes: on disk, KV included. error: why the session cannot
    be read; "" when it can, otherwise n_messages, title and has_kv say nothing.
    """

    name: str
    saved_at: float
    n_messages: int
    title: str
    n_bytes: int
    has_kv: bool
    error: str


@dataclass(slots=True, frozen=True)
class Restored:
    """A session that was read. n_cached: tokens that the engine need not evaluate again.

    notices: what the user should know, a line each.
    """

    session: Session
    n_cached: int
    notices: list[str]


def check_name(name: str) -> str:
    """The name in its canonical form. Raises ValueError for one that could not be a folder's."""
    name = unicodedata.normalize("NFC", name)
    if (
        not name
        or len(name) > MAX_NAME_CHARS
        or len(name.encode(errors="replace")) > MAX_NAME_BYTES
    ):
        raise ValueError(f"session name has {len(name)} characters; use 1 to {MAX_NAME_CHARS}")
    bad = next((c for c in name if not (c.isalnum() or c in " ._-")), None)
    if bad is not None:
        raise ValueError(
            f"session name holds {bad!r}; use letters, digits, blank, '.', '_' and '-'"
        )
    if not name[0].isalnum() or name[-1] in " ." or RESERVED.fullmatch(name):
        raise ValueError(
            f"session name {name!r} cannot be a folder's everywhere; begin with a letter or digit, "
            "and do not end with a blank or '.'"
        )
    return name


class SessionStore:
    """The sessions in one folder; it is made when the first is saved."""

    __slots__ = ("folder",)

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None for the one in the user's data folder."""
        data = Path(platformdirs.user_data_dir("dspark_edge", appauthor=False))
        self.folder = folder if folder is not None else data / "sessions"

    def exists(self, name: str) -> bool:
        """Whether there is such a session, readable or not. Raises ValueError for a bad name."""
        return (self._place(name) / TEXT_FILE).is_file()

    def save(
        self, name: str, session: Session, *, engine: Engine | None = None, keep_kv: bool = False
    ) -> list[str]:
        """Replaces the session of that name, or makes it, in one step. Returns notices.

        engine: both KV states of the conversation are kept too; no request of it may be running.
        Without one there is text only, or, with keep_kv, the text and the KV of the save before:
        for quick saves after each turn. KV that cannot be had or written costs a notice, no more.
        Raises SessionError with the old session untouched, ValueError for a bad name or for values
        that JSON cannot hold.
        """
        place = self._place(name)
        with _saying(f"session {name!r} cannot be saved in {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            place.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
        flush_folder(self.folder)
        notices: list[str] = []
        kv = self._old_kv(place) if engine is not None or keep_kv else None
        new_kv: KvFile | None = None
        if engine is not None:
            session.made_with(engine)
            try:
                new_kv = _write_kv(place, _kv_states(session, engine))
            except (DsparkError, ValueError, MemoryError, OSError) as error:
                notices.append(f"the KV states are not kept, only the text: {_reason(error)}")
        stored = Stored(session, time.time(), new_kv or kv)
        try:
            with _saying(f"session {name!r} cannot be saved in {self.folder}"):
                text = session_text(stored)
                replace_file(place / TEXT_FILE, text.encode("ascii"), mode=PRIVATE_FILE)
        except BaseException:
            if new_kv is not None:
                with suppress(OSError):
                    (place / new_kv.name).unlink()
            with suppress(OSError):
                place.rmdir()  # of a first save; an older session is in the way of that
            raise
        _sweep(place, stored.kv)
        return notices

    def load(self, name: str, *, engine: Engine | None = None) -> Restored:
        """Reads a session; its KV states go into a free sequence of the engine.

        Raises SessionError: there is none, it is damaged, it is from a newer version. A KV file
        that does not fit costs a notice and the time to evaluate the text again.
        """
        place = self._place(name)
        stored = _read(place, name)
        if engine is None:
            return Restored(stored.session, 0, [])
        notices = _differences(stored.session, engine)
        n_cached = 0
        if stored.kv is not None:
            try:
                n_cached = engine.load_cache(_read_kv(place, stored.kv))
            except (DsparkError, ValueError, MemoryError, OSError) as error:
                notices.append(f"the text is evaluated again, without saved KV: {_reason(error)}")
        return Restored(stored.session, n_cached, notices)

    def list(self) -> list[SessionInfo]:
        """All sessions, the newest first; those that cannot be read, with the reason.

        Raises SessionError when the folder cannot be read.
        """
        try:
            names = [entry.name for entry in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SessionError(f"{self.folder} cannot be read: {_reason(error)}") from error
        infos = [self._info(name) for name in names if self._is_session(name)]
        return sorted(infos, key=lambda info: (-info.saved_at, info.name))

    def delete(self, name: str) -> None:
        """Removes a session and its KV states. Raises SessionError."""
        place = self._found(name)
        with _saying(f"session {name!r} cannot be deleted"):
            # Out of sight in one step, however long removing takes.
            place.rename(self.folder / f"{DELETED}{secrets.token_hex(8)}")
        for gone in self.folder.glob(f"{DELETED}*"):
            shutil.rmtree(gone, ignore_errors=True)
        flush_folder(self.folder)

    def rename(self, old: str, new: str) -> None:
        """Gives a session another name. Raises SessionError, also when that name is taken."""
        place, target = self._found(old), self._place(new)
        if self.exists(new):
            raise SessionError(
                f"there is a session {new!r} already; delete it or take another name"
            )
        with _saying(f"session {old!r} cannot be renamed to {new!r}"):
            if target.exists():  # debris of a first save that was killed
                target.rename(self.folder / f"{DELETED}{secrets.token_hex(8)}")
            place.rename(target)
        flush_folder(self.folder)

    def _place(self, name: str) -> Path:
        return self.folder / check_name(name)

    def _found(self, name: str) -> Path:
        if not self.exists(name):
            raise SessionError(f"there is no session {name!r} in {self.folder}")
        return self._place(name)

    def _is_session(self, name: str) -> bool:
        try:
            return self.exists(name)
        except (ValueError, OSError):
            return False

    def _old_kv(self, place: Path) -> KvFile | None:
        with suppress(SessionError):
            return _read(place, place.name).kv
        return None

    def _info(self, name: str) -> SessionInfo:
        place = self._place(name)
        n_bytes, changed_at = 0, 0.0
        with suppress(OSError):  # it may go, or be replaced, while it is looked at
            n_bytes = sum(file.stat().st_size for file in place.iterdir())
            changed_at = (place / TEXT_FILE).stat().st_mtime
        try:
            stored = _read(place, name)
        except SessionError as error:
            return SessionInfo(name, changed_at, 0, "", n_bytes, False, str(error))
        session, has_kv = stored.session, stored.kv is not None
        n_messages, title = len(session.messages), session.title
        return SessionInfo(name, stored.saved_at, n_messages, title, n_bytes, has_kv, "")


def _read(place: Path, name: str) -> Stored:
    path = place / TEXT_FILE
    try:
        return session_of(path.read_bytes().decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SessionError(f"there is no session {name!r} in {place.parent}") from error
    except (OSError, ValueError, MemoryError, RecursionError) as error:
        raise SessionError(f"session {name!r} cannot be read ({path}): {_reason(error)}") from error


def _kv_states(session: Session, engine: Engine) -> bytes:
    tokens = session.tokens or engine.tokenize(engine.render(session.messages), add_special=False)
    blob = engine.save_cache(tokens)
    if not blob:
        raise ValueError("the engine holds nothing of this conversation")
    return blob


def _write_kv(place: Path, blob: bytes) -> KvFile:
    kv = KvFile(f"kv-{secrets.token_hex(8)}.bin", len(blob))
    replace_file(place / kv.name, blob, mode=PRIVATE_FILE)
    return kv


def _read_kv(place: Path, kv: KvFile) -> bytes:
    if not KV_NAME.fullmatch(kv.name):
        raise ValueError(f"{kv.name[:40]!r} is no name of a KV file")
    blob = (place / kv.name).read_bytes()
    if len(blob) != kv.n_bytes:
        raise ValueError(f"{kv.name} has {len(blob)} bytes, not {kv.n_bytes}")
    return blob


def _sweep(place: Path, kv: KvFile | None) -> None:
    """Removes KV files that no session names any more, and what killed processes left."""
    with suppress(OSError):
        for file in place.iterdir():
            is_old_kv = KV_NAME.fullmatch(file.name) and (kv is None or file.name != kv.name)
            is_stale = file.name.endswith(TEMPORARY) and (
                time.time() - file.stat().st_mtime > STALE_S
            )
            if is_old_kv or is_stale:
                file.unlink(missing_ok=True)


def _differences(session: Session, engine: Engine) -> list[str]:
    """What is loaded now that is not what the session was saved with."""
    now = engine.identity
    if session.target and session.target != now.target:
        return [f"this session was saved with {_name(session.target)}, not with this model"]
    if session.target and session.drafter != now.drafter:
        return [
            f"this session was saved with drafter {_name(session.drafter)}: same text, other speed"
        ]
    if session.target and session.calibration != now.calibration:
        return ["the drafter's calibration has changed since this session was saved: same text"]
    return []


def _name(identity: str) -> str:
    return identity.rpartition(" ")[0] or "none"


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """OSError becomes SessionError with a line that a user can act on."""
    try:
        yield
    except OSError as error:
        raise SessionError(
            f"{what}: {_reason(error)}; free space there or choose another folder"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return " ".join(str(error).split()) or type(error).__name__
