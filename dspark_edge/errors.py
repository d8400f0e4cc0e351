"""Every exception this package raises on purpose, apart from ValueError for a caller's mistake.

Messages are one line: what happened, the value, the limit, the way out. The C++ extension raises
these same classes.
"""


class DsparkError(Exception):
    """Base of all errors of this package."""


class ModelError(DsparkError):
    """A model file is missing, unreadable, or of a kind that cannot be decoded here."""


class PairError(DsparkError):
    """A drafter does not belong to this target, or its file is not usable."""


class ContextFullError(DsparkError):
    """The tokens do not fit into the sequence's context."""


class MemoryPlanError(DsparkError):
    """What was asked for does not fit into memory."""


class BusyError(DsparkError):
    """New requests are refused for now; retry_s: seconds after which to come back."""

    def __init__(self, message: str, *, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class SessionError(DsparkError):
    """A saved session cannot be written, read, found or renamed."""


class DecodeError(DsparkError):
    """llama.cpp could not evaluate a batch, or the decoder was used from two threads at once."""
