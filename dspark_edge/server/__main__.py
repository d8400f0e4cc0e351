"""python -m dspark_edge.server: the command line.

Refuses to know what its values do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import DsparkError
from ..files import refuse_existing
from .app import create_app
from .catalogue import FolderCatalogue
from .lifecycle import listen, serve
from .log import set_up_logging
from .settings import EngineOptions, Settings

EXIT_OK, EXIT_ERROR = 0, 1
SWITCH_S = 0.0005  # how long another thread may keep the engine's thread from going on


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a signal or the parent's death, 1 for our errors."""
    args = _parser().parse_args(argv)
    try:
        settings = settings_of(args)
        catalogue = FolderCatalogue(settings.model, settings.models_dirs)
        listening = listen(settings.host, settings.port)
    except (DsparkError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    sys.setswitchinterval(SWITCH_S)
    set_up_logging()
    is_served = False

    async def run() -> None:
        nonlocal is_served
        is_served = await serve(create_app(settings, catalogue), settings, listening)

    try:
        asyncio.run(run())
    except DsparkError as error:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_OK if is_served else EXIT_ERROR


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ValueError and OSError."""
    key = args.api_key_file.read_text(encoding="utf-8").strip() if args.api_key_file else None
    template: Path | None = args.chat_template
    trace: Path | None = args.trace.expanduser() if args.trace else None
    if trace is not None:
        refuse_existing(trace)
    return Settings(
        host=args.host,
        port=args.port,
        model=args.model,
        models_dirs=tuple(args.models_dir),
        chat_template=template.read_text(encoding="utf-8") if template else None,
        engine=EngineOptions(
            drafter=None if args.drafter == "none" else args.drafter,
            n_ctx=args.ctx,
            n_seq=args.parallel,
            n_gpu_layers=args.gpu_layers,
            n_threads=args.threads,
            speculation=args.speculation,
            trace=trace,
        ),
        api_key=key,
        allow_hosts=tuple(args.allow_host),
        cors_origins=tuple(args.cors_origin),
        max_queue=args.max_queue,
        keep_alive_s=args.keep_alive,
        drain_s=args.drain,
        parent_pid=args.parent_pid,
        log_content=args.log_content,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark-edge serve",
        description="OpenAI-compatible server for GGUF models, with continuous batching.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="elsewhere than on loopback a key is required")
    add("--port", type=int, default=8080, help="0: any; one JSON line on stdout says which")
    add("--model", default="default", help="GGUF file (default: SmolLM2-135M)")
    add("--models-dir", type=Path, action="append", default=[], help="folder of GGUF files")
    add("--drafter", default="auto", help="auto, lookup, none, or a drafter's GGUF file")
    add("--chat-template", type=Path, help="jinja2 file instead of the model's own template")
    add("--ctx", type=int, default=4096, help="tokens that one conversation can hold")
    add("--parallel", type=int, default=4, help="requests that run at the same time")
    add("--max-queue", type=int, default=64, help="requests that may wait; more get 429")
    add("--keep-alive", type=float, default=300.0, help="idle seconds until unload; -1: never")
    add("--drain", type=float, default=30.0, help="seconds that replies may go on after SIGTERM")
    add("--parent-pid", type=int, help="leave when this process ends")
    add("--api-key-file", type=Path, help="file with the key that clients must send")
    add("--allow-host", action="append", default=[], help="name that Host may have")
    add("--cors-origin", action="append", default=[], help="origin of a web page that may call")
    add("--log-content", action="store_true", help="log prompts and replies")
    add("--trace", type=Path, help="new file for one JSON line per round; see bench explain")
    add("--speculation", choices=("auto", "always", "off"), default="auto")
    add("--threads", type=int, help="default: the physical cores")
    add("--gpu-layers", type=int, default=-1, help="-1: all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
