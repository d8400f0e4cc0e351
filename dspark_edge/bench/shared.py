"""What the bench commands share: where they print, and how they are added."""

from __future__ import annotations

import argparse
import sys
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def say(text: str) -> None:
    """A line for people: stderr, since stdout belongs to the JSON document."""
    print(text, file=sys.stderr, flush=True)
