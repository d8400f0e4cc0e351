"""What was typed or piped, as text: whole UTF-8, or a line that says where it is not.

Refuses to know what the text is for.
"""

from __future__ import annotations

BOM = "\ufeff"  # some editors and shells begin a file with it


def text_of(raw: bytes) -> str:
    """Bytes of standard input as text. Raises ValueError for what is no UTF-8."""
    try:
        return raw.decode("utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        n_line = raw.count(b"\n", 0, error.start) + len("\n")
        raise ValueError(
            f"standard input is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}, "
            f"line {n_line}; convert it first, e.g. iconv -f LATIN1 -t UTF-8"
        ) from error


def check_text(text: str, what: str) -> str:
    """The text itself. Raises ValueError where bytes that are no UTF-8 came through as surrogates.

    what: where it comes from.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python lets byte 0xNN through as U+DCNN.
        raise ValueError(
            f"{what} is not UTF-8: byte 0x{ord(text[error.start]) & 0xFF:02x} behind "
            f"{error.start} characters; set the terminal, or convert the text, to UTF-8"
        ) from error
    return text
