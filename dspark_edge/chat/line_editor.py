"""Reads what is typed: editing, history across runs, several lines, paste, Tab.

Writes to standard error where that is a terminal, so that standard output holds replies only.
Refuses to know commands and models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

PROMPT, CONTINUED = "> ", "  "
PRIVATE = 0o600

Complete = Callable[[str], tuple[str, list[str]]]  # as commands.complete


def history_path() -> Path:
    """The file that keeps what was typed."""
    return Path(platformdirs.user_state_dir("dspark_edge", appauthor=False)) / "chat_history"


class LineEditor:
    """One prompt after another on the terminal of this process; a dumb one gets plain lines.

    notice: why history is not kept, or "".
    """

    def __init__(self, complete: Complete, *, history: Path | None) -> None:
        """history: the file to keep it in; None: it is kept for this run only."""
        self.notice = ""
        terminal = next((s for s in (sys.stderr, sys.stdout) if s.isatty()), None)
        self._plain = terminal if is_dumb_terminal() else None
        self._session: PromptSession[str] | None = None
        if terminal is not None and self._plain is None:
            self._session = PromptSession(
                history=self._history(history),
                completer=_Tab(complete),
                complete_while_typing=False,
                multiline=True,
                key_bindings=_keys(),
                prompt_continuation=CONTINUED,
                output=create_output(stdout=terminal),
            )

    def read(self, text: str = "") -> str:
        """The next message; text: to begin with.

        Raises EOFError (Ctrl-D on an empty line, the end of the input) and KeyboardInterrupt.
        """
        if self._session is None:
            return self._read_plainly()
        return self._session.prompt(PROMPT, default=text)

    def _read_plainly(self) -> str:
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            if self._plain is not None:
                self._plain.write(CONTINUED if lines else PROMPT)
                self._plain.flush()
            lines.append(input())
        return "\n".join([*(line[:-1] for line in lines[:-1]), lines[-1]])

    def _history(self, path: Path | None) -> History:
        if path is None:
            return InMemoryHistory()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, PRIVATE))
        except OSError as error:
            self.notice = f"history is not kept: {error}"
            return InMemoryHistory()
        if not path.is_file():  # a device or a pipe, which might never end
            self.notice = f"history is not kept: {path} is no plain file"
            return InMemoryHistory()
        return _FileHistory(str(path))


class _FileHistory(FileHistory):
    """Goes on without the file when it cannot be written any more, e.g. on a full disk."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


class _Tab(Completer):
    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        begun, words = self._complete(document.text_before_cursor)
        return [Completion(word, start_position=-len(begun)) for word in words]


def _keys() -> KeyBindings:
    """Enter sends, unless a backslash stands before it; Alt-Enter begins another line; Ctrl-C
    clears what was typed."""
    keys = KeyBindings()

    @keys.add("enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:  # what was typed goes, and nothing else ends
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    @keys.add(Keys.Vt100MouseEvent)
    def _(event: KeyPressEvent) -> None:
        """Nothing: no mouse is used, and colours pasted as raw keys look like its events, on which
        prompt_toolkit's own handler would end the prompt."""

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
