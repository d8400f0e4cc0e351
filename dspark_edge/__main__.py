"""The dspark-edge command: one word picks the program."""

from __future__ import annotations

import sys

from .startup import end_on_ctrl_c, raise_on_ctrl_c

COMMANDS = ("chat", "serve", "bench", "models", "distill")


def main() -> int:
    """Runs `dspark-edge COMMAND ...`; returns its exit code."""
    end_on_ctrl_c()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "chat":
        from . import chat

        code = chat.main(sys.argv[2:])
        end_on_ctrl_c()
        return code
    if name == "serve":
        try:
            from .server import __main__ as server
        except ModuleNotFoundError as error:
            print(f'error: {error}; pip install "dspark-edge[server]" brings it', file=sys.stderr)
            return 1
        raise_on_ctrl_c()
        return server.main(sys.argv[2:])
    if name == "bench":
        from .bench import __main__ as bench

        raise_on_ctrl_c()
        return bench.main(sys.argv[2:])
    if name == "models":
        from .models import __main__ as models

        raise_on_ctrl_c()
        return models.main(sys.argv[2:])
    if name == "distill":
        from .distill import __main__ as distill

        raise_on_ctrl_c()
        return distill.main(sys.argv[2:])
    is_asked = name in ("-h", "--help")
    usage = f"usage: dspark-edge {{{','.join(COMMANDS)}}} ..."
    print(usage, file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


if __name__ == "__main__":
    sys.exit(main())
