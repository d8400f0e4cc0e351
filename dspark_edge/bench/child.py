"""A server process of our own: started, awaited, and ended whatever happens.

Refuses to know which server, and what it is asked.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .http_client import HttpClient

START_S = 300.0  # for loading the model
STOP_S = 10.0  # for leaving after SIGTERM
POLL_S = 0.05
POLL_TIMEOUT_S = 5.0


class Child:
    """Runs from when it is made until it is closed; its log goes to a file that goes with it."""

    def __init__(self, name: str, command: Sequence[str], *, tells: bool = False) -> None:
        """name: for errors. tells: its stdout is for first_line and not for the log."""
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if tells else log,
                stderr=log if tells else subprocess.STDOUT,
            )

    def first_line(self) -> str:
        """What it says first on its stdout. Raises OSError when it ends without a word."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode("utf-8", errors="replace")
        if not line:
            raise OSError(f"{self.name} ended with {self._process.wait()}: {self.last_line()}")
        return line

    def await_health(self, client: HttpClient, status: str) -> None:
        """Returns when GET /health answers with this status. Raises OSError when it does not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise OSError(f"{self.name} ended with {code}: {self.last_line()}")
            try:
                if client.get("/health", timeout_s=POLL_TIMEOUT_S).get("status") == status:
                    return
            except (OSError, ValueError):  # not listening yet, or 503 while it loads
                pass
            time.sleep(POLL_S)
        raise OSError(f"{self.name} was not ready after {START_S:g} s: {self.last_line()}")

    def last_line(self) -> str:
        """Of its log."""
        lines = self._log.read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()
