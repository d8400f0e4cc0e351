"""The bench commands: tables go to stderr, one JSON document to stdout (Markdown by `tables`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..arguments import in_flags
from ..errors import DsparkError
from ..startup import EXIT_INTERRUPTED
from . import (
    calibrate,
    compare,
    explain,
    overhead,
    profile,
    replay,
    run,
    run_memory,
    server,
    tables,
)
from .output import deliver
from .shared import say


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for our errors and for a text that changed, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="dspark-edge bench", description="What this machine does with a pair, measured."
    )
    commands = parser.add_subparsers(required=True)
    for module in (run, run_memory, compare, server, tables, profile, overhead):
        module.add_commands(commands)
    for module in (calibrate, explain, replay):
        module.add_commands(commands)
    args = parser.parse_args(argv)
    try:
        report = args.run(args)
    except (DsparkError, ValueError) as error:
        say(f"error: {in_flags(error)}")
        return 1
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; there is no report")
        return EXIT_INTERRUPTED
    is_failed = isinstance(report, dict) and report.get("is_failed", False)
    return 0 if deliver(report, args) and not is_failed else 1


if __name__ == "__main__":
    sys.exit(main())
