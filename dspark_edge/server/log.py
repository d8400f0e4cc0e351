"""What is logged, on stderr: one line a request, and places of failures without their values.

Messages of exceptions may quote prompts, so they are left out.
"""

from __future__ import annotations

import logging
import sys
import traceback

logger = logging.getLogger("dspark_edge.server")


def set_up_logging() -> None:
    """Sends this server's and uvicorn's lines to stderr; stdout belongs to the ready line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("dspark_edge.server", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(level)
        log.propagate = False
    # It would write the whole traceback of a failed request; log_failure has said it already.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def log_failure(what: str, error: BaseException) -> None:
    """Logs the kind of an exception and where it came from."""
    places = [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    logger.error("%s: %s at %s", what, type(error).__name__, " < ".join(reversed(places)))
