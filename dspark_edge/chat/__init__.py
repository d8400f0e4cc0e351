"""The chat in a terminal: a conversation that a person keeps, or one reply to a script.

app.py picks which; talk.py is the conversation going on, commands.py what a line that starts with a
slash does, reply.py one reply, screen.py and markdown.py how it looks.
"""

from .app import main

__all__ = ["main"]
