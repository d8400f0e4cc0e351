"""The chat in a terminal: a conversation that a person keeps, or one reply to a script.

app.py picks which; run.py runs either, talk.py is the conversation going on, commands.py what a
line that starts with a slash does, reply.py one reply, screen.py and markdown.py how it looks.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """As app.main, imported when it is run: until then Ctrl-C would show a traceback."""
    from .app import main as run

    return run(argv)


__all__ = ["main"]
