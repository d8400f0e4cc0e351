"""What the bench commands share: where they print, and how they are added."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def say(text: str) -> None:
    """A line for people: stderr, since stdout belongs to the JSON document."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on stderr; call what it gives after each of `total` steps.

    Drawn only then: a thread of its own would take time from what is measured. Absent when stderr
    is not a terminal.
    """
    console = Console(file=sys.stderr)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def said_last(done: subprocess.CompletedProcess[str]) -> str:
    """How a process that failed ended: its exit code, and its last line on stderr."""
    lines = done.stderr.strip().splitlines()
    return f"ended with {done.returncode}: {lines[-1] if lines else 'it said nothing'}"


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux lets ru_maxrss of a child start at its parent's, VmHWM does not.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
