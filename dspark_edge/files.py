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


def write_atomically(path: Path, text: str) -> bool:
    """Replace the file by this text, in one step; False when the place is not writable."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, FILE_MODE)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return False
    return True


def fingerprint(path: Path) -> str:
    """Size and hash of both ends. Raises OSError when the file cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HASHED_BYTES))
        file.seek(max(0, size - HASHED_BYTES))
        digest.update(file.read(HASHED_BYTES))
    return f"{size}-{digest.hexdigest()}"
