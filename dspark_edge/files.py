"""Files that are written whole or not at all, and told apart without being read.

Refuses to know what is in them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

HASHED_BYTES = 1 << 20  # of each end of a file: enough to tell files apart
FILE_MODE = 0o644
TEMPORARY = ".tmp"  # ending of files that are being written, or were when a process died


def refuse_existing(path: Path) -> None:
    """Raises ValueError where writing would replace something; a device or a pipe is nothing."""
    if path.is_file() or path.is_dir():
        raise ValueError(f"{path} is there already; give another name, or remove it first")


def write_atomically(path: Path, text: str) -> bool:
    """Replace the file by this text, in one step; False when the place is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(), mode=FILE_MODE)
    except OSError:
        return False
    return True


def replace_file(path: Path, content: bytes, *, mode: int) -> None:
    """Replace the file by this content, in one step that a crash of the machine does not undo.

    A process that dies meanwhile leaves the old file, and one beside it that ends in TEMPORARY.
    Raises OSError with the old file as it was.
    """
    # mkstemp makes files that only their owner can read.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files; does nothing where that is unknown."""
    if os.name == "nt":
        return  # folders cannot be opened there, and NTFS keeps a journal of names
    with suppress(OSError):  # some file systems refuse it; the files themselves are safe
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def fingerprint(path: Path) -> str:
    """Size and hash of both ends. Raises OSError when the file cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HASHED_BYTES))
        file.seek(max(0, size - HASHED_BYTES))
        digest.update(file.read(HASHED_BYTES))
    return f"{size}-{digest.hexdigest()}"
