"""One process at a time on a work folder.

The lock is the system's own: it ends with its process, however that ends. Refuses to know what is
in the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import DsparkError

LOCK_FILE = "lock"  # stays behind, and means nothing when nobody holds it


@contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Keeps other processes out of the folder, which is made where it is missing.

    Raises DsparkError when one is in it, OSError when the folder cannot be written.
    """
    work.mkdir(parents=True, exist_ok=True)
    lock = FileLock(work / LOCK_FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise DsparkError(
            f"{work} is in use by another process; wait for it, stop it, or give another --work"
        ) from error
    try:
        yield
    finally:
        lock.release()
