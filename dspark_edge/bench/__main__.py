"""The bench commands: tables go to stderr, one JSON document to stdout (Markdown by `tables`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ..errors import DsparkError
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
from .shared import say


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 for our errors and for a text that changed."""
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
    except (DsparkError, ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    if isinstance(report, str):
        print(report)
        return 0
    print(json.dumps(report))
    return 1 if report.get("is_failed", False) else 0


if __name__ == "__main__":
    sys.exit(main())
