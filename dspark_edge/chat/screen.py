"""What goes to the terminal: replies to stdout, everything else to stderr, styled where it may be.

No style is used where the output is no terminal, where NO_COLOR is set, or on a dumb terminal.
Refuses to know what is said.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from .folding import fitted

if TYPE_CHECKING:
    from rich.console import Console

# What a model writes must not move the cursor, ring, or rename the window.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REPLACEMENT = "\ufffd"
MIN_FITTED_COLUMNS = 60  # with fewer, whole lines in more rows say more than their ends


class Screen:
    """Standard output and standard error as they are when it is made."""

    def __init__(self) -> None:
        self._out = _Output(sys.stdout)
        self._err = _Output(sys.stderr)

    @property
    def shows_style(self) -> bool:
        """Whether replies can be styled."""
        return self._out.is_styled

    @property
    def is_terminal(self) -> bool:
        """Whether replies go to a terminal."""
        return self._out.is_terminal

    def reply(self, text: str, style: str = "") -> None:
        """A piece of the reply, as it is; shown at once."""
        self._out.write(text, style)

    def say(self, text: str, style: str = "") -> None:
        """A line for the user, folded between words on a terminal."""
        self._err.line(text, style)

    def state(self, text: str) -> None:
        """A line about the state of things: dimmed."""
        self._err.line(text, "dim")

    def states(self, lines: Sequence[str], *, most_rows: int) -> None:
        """Lines about the state of things, shortened where a terminal would need more rows."""
        for line in self._err.fitted(lines, most_rows):
            self.state(line)

    def error(self, error: object) -> None:
        """A line about what went wrong."""
        self._err.line(f"error: {error}", "red")

    def pieces(self, pieces: list[tuple[str, str]]) -> None:
        """A line for the user, made of texts with their styles."""
        for text, style in pieces:
            self._err.write(text, style)
        self._err.write("\n", "")

    @property
    def says_in_style(self) -> bool:
        """Whether lines for the user can be styled."""
        return self._err.is_styled


class _Output:
    """One stream."""

    __slots__ = ("_console", "_stream", "is_styled", "is_terminal")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
        self.is_styled = self.is_terminal and not os.environ.get("NO_COLOR") and not is_dumb
        self._console: Console | None = None

    def write(self, text: str, style: str) -> None:
        if self.is_terminal:
            text = _CONTROL.sub(_REPLACEMENT, text)
        if self.is_styled and style:
            self._rich().out(text, style=style, end="", highlight=False)
        else:
            self._stream.write(text)
        self._stream.flush()

    def line(self, text: str, style: str) -> None:
        """A line of its own, folded between words on a terminal and never elsewhere."""
        if not self.is_terminal:
            self.write(f"{text}\n", "")
            return
        text = _CONTROL.sub(_REPLACEMENT, text)
        self._rich().print(text, style=style if self.is_styled else None)

    def fitted(self, lines: Sequence[str], most_rows: int) -> Sequence[str]:
        """The lines, of which a terminal needs no more rows than that; a narrow one shows all."""
        if not self.is_terminal or self._rich().width < MIN_FITTED_COLUMNS:
            return lines
        from rich.text import Text  # slow, as the console is

        console = self._rich()
        return fitted(
            lines,
            most_rows=most_rows,
            columns=console.width,
            n_rows_of=lambda line: len(Text(line).wrap(console, console.width)),
        )

    def _rich(self) -> Console:
        if self._console is None:
            from rich.console import Console  # slow, and pipes need none

            self._console = Console(
                file=self._stream,
                color_system="auto" if self.is_styled else None,
                highlight=False,
                markup=False,
                emoji=False,
            )
        return self._console
