"""The chat on a terminal of its own, used as a person does: keys go in, a screen is looked at.

Knows how to wait and what the screen shows; knows nothing of the chat's words.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120
CHAT = ("-m", "dspark_edge.chat")
ROWS = 300  # nothing scrolls away

CTRL_C, CTRL_D, UP, ALT_ENTER, TAB = "\x03", "\x04", "\x1b[A", "\x1b\r", "\t"
PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"


def chat_environment(folder: Path) -> dict[str, str]:
    """An environment in which the chat keeps its files in a folder of the test's."""
    homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "STATE", "DATA")}
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    return plain | homes | {
        "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", "TERM": "xterm-256color",
    }  # fmt: skip


class Terminal:
    """One chat. raw: everything that it wrote, styles included. banner: for who
    opens it. program: Python's arguments in front of the options."""

    def __init__(
        self,
        env: Mapping[str, str],
        *options: str,
        columns: int = 100,
        program: Sequence[str] = CHAT,
    ) -> None:
        self._child = pexpect.spawn(
            sys.executable,
            [*program, *options],
            env=dict(env),
            dimensions=(ROWS, columns),
            timeout=PATIENCE_S,
        )
        self._screen = pyte.Screen(columns, ROWS)
        self._screen.write_process_input = self._child.send  # it asks where the cursor is
        self._stream = pyte.ByteStream(self._screen)
        self._seen = 0  # rows of the screen that were waited for already
        self.raw = ""
        self.banner = ""

    def send(self, keys: str) -> None:
        """Presses keys."""
        self._child.send(keys)

    def send_bytes(self, keys: bytes) -> None:
        """Sends what no keyboard would."""
        self._child.send(keys)

    def resize(self, columns: int) -> None:
        """Makes the window narrower or wider."""
        self._screen.resize(ROWS, columns)
        self._child.setwinsize(ROWS, columns)

    def enter(self, line: str) -> None:
        """Types a line and sends it."""
        self._child.send(f"{line}\r")

    def rows(self) -> list[str]:
        """What the screen shows, blanks at the ends cut off."""
        return [row.rstrip() for row in self._screen.display]

    def wait_for(self, pattern: str) -> str:
        """Waits until the screen shows it below the row that was waited for before, and gives what
        is there, up to and with it."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            text = "\n".join(self.rows()[self._seen :])
            if found := re.search(pattern, text):
                shown = text[: found.end()]
                self._seen += shown.count("\n") + 1
                return shown
            assert time.monotonic() < end_s, f"no {pattern!r} in {text.strip()!r}"
            self._read(f"no {pattern!r} in {text.strip()!r}")

    def wait_until_shown(self, pattern: str) -> None:
        """Waits until the screen shows it anywhere, e.g. in the line being typed."""
        end_s = time.monotonic() + PATIENCE_S
        while not re.search(pattern, "\n".join(self.rows())):
            assert time.monotonic() < end_s, f"no {pattern!r}"
            self._read(f"no {pattern!r}")

    def _read(self, otherwise: str) -> None:
        try:
            data = self._child.read_nonblocking(4096, timeout=1)
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF as error:
            raise AssertionError(f"the chat ended: {otherwise}") from error
        self.raw += data.decode(errors="replace")
        self._stream.feed(data)

    def wait_for_prompt(self) -> str:
        """Waits for an empty prompt at the end of the screen, and gives what came before it."""
        return self.wait_for(r"(?m)^> ?$(?=\n*\Z)")

    def say(self, line: str) -> str:
        """Sends a line, and gives what is shown until the next prompt."""
        self.enter(line)
        return self.wait_for_prompt()

    def exit_code(self) -> int:
        """Waits for the end of the chat."""
        self._child.expect(pexpect.EOF)
        self.raw += (self._child.before or b"").decode(errors="replace")
        self._child.close()
        return int(self._child.exitstatus if self._child.exitstatus is not None else -1)

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self._child.kill(number)

    def close(self) -> None:
        """Ends the chat, whatever it does."""
        self._child.close(force=True)
