"""python -m dspark_edge.chat: a conversation in a terminal, or one reply to what is piped in.

Replies go to stdout, everything else to stderr. Refuses to know how decoding works.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from .engine import Engine
from .errors import DsparkError
from .sequence import SamplingParams, Stats

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for our errors, 2 for wrong arguments, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    if sys.stdin is None or sys.stdout is None:
        _say("error: standard input or output is closed; open it or use /dev/null")
        return EXIT_ERROR
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is not text in this locale is U+FFFD
    try:
        params = SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
            max_tokens=args.max_tokens,
        )
        with Engine(
            args.model,
            drafter=None if args.drafter == "none" else args.drafter,
            n_ctx=args.ctx,
            n_seq=1,
            n_gpu_layers=args.gpu_layers,
            n_threads=args.threads,
            speculation=args.speculation,
        ) as engine:
            if args.trace:
                engine.trace_to(args.trace)
            return _Chat(engine, params, args.system).run(sys.stdin)
    except (DsparkError, ValueError) as error:
        _say(f"error: {error}")
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _output_lost(error)


def _output_lost(error: OSError) -> int:
    """Nobody reads the reply any more, or the disk is full: say it once, and close quietly."""
    if not isinstance(error, BrokenPipeError):
        _say(f"error: {error}")
    # Python would try to flush the rest at exit and complain a second time.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_ERROR


class _Chat:
    """One conversation: its messages, and the way to show a reply."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._messages: list[Mapping[str, object]] = []
        if system:
            self._messages.append(_message("system", system))

    def run(self, source: TextIO) -> int:
        self._banner()
        if not source.isatty():
            text = source.read().strip()
            if not text:
                _say("error: nothing to answer: standard input is empty")
                return EXIT_USAGE
            return EXIT_OK if self._reply(text) else EXIT_INTERRUPTED
        with suppress(EOFError, KeyboardInterrupt):  # Ctrl-D, or Ctrl-C at the prompt: leave
            while True:
                self._turn()
        _say("")
        return EXIT_OK

    def _turn(self) -> None:
        # Not by input(), which writes it to stdout where that is a file.
        print("> ", end="", file=sys.stderr, flush=True)
        text = input().strip()
        if text in ("/quit", "/exit"):
            raise EOFError
        if not text:
            return
        try:
            self._reply(text)
        except (DsparkError, ValueError) as error:
            # The conversation stays as it was before this turn.
            _say(f"error: {error}")

    def _reply(self, text: str) -> bool:
        """Streams a reply. False when Ctrl-C stopped it: what was said so far stays."""
        messages: list[Mapping[str, object]] = [*self._messages, _message("user", text)]
        stream = self._engine.chat(messages, self._params)
        said: list[str] = []
        stats: Stats | None = None
        reason: str | None = None
        interrupted = False
        try:
            for chunk in stream:
                stats, reason = chunk.stats, chunk.finish_reason
                said.append(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            stream.close()  # aborts the request when it has not ended
        print()
        self._messages = [*messages, _message("assistant", "".join(said))]
        if reason == "context_full":
            _say("the context is full: start a new conversation or pass a larger --ctx")
        for line in self._engine.take_pressure_news():
            _say(_dim(line))
        if stats is not None:
            _say(_dim(_status(stats)))
        return not interrupted

    def _banner(self) -> None:
        engine = self._engine
        _say(_dim(f"{engine.target_name} | drafter: {engine.drafter_name} | ctx {engine.n_ctx}"))
        _say(_dim(f"speculation {engine.speculation_state}"))
        for notice in engine.notices:
            _say(_dim(notice))


def _message(role: str, content: str) -> Mapping[str, object]:
    return {"role": role, "content": content}


def _status(stats: Stats) -> str:
    """E.g. "128 tokens, 41.2 tok/s, tau 2.6, accepted 64 %"."""
    parts = [f"{stats.n_tokens} tokens", f"{stats.tps:.1f} tok/s", f"tau {stats.tau:.1f}"]
    if stats.n_verified:
        parts.append(f"accepted {100 * stats.acceptance:.0f} %")
    else:
        parts.append("no draft verified")
    if stats.speculation.startswith(("parked", "off", "drafter released")):
        parts.append(f"speculation {stats.speculation}")
    return ", ".join(parts)


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark-edge chat",
        description="Chat with a GGUF model; piped input gets one reply on standard output.",
    )
    parser.add_argument("--model", default="default", help="GGUF file (default: SmolLM2-135M)")
    parser.add_argument(
        "--drafter", default="auto", help="auto, lookup, none, or a drafter's GGUF file"
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens the context holds")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0: off")
    parser.add_argument("--seed", type=int, help="same seed, same text")
    parser.add_argument("--max-tokens", type=int, help="longest reply")
    parser.add_argument("--speculation", choices=("auto", "always", "off"), default="auto")
    parser.add_argument("--trace", help="file for one JSON line per round; see bench explain")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1: all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
