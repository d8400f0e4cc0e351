"""The chat's arguments, and what they say of sampling and of the drafter.

Refuses to know what is done with them.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..sequence import SamplingParams

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


def parser() -> argparse.ArgumentParser:
    """The arguments of `dspark-edge chat`."""
    parser = argparse.ArgumentParser(
        prog="dspark-edge chat",
        description="Chat with a GGUF model. With --prompt, or with piped input, it gives one "
        "reply on standard output and leaves.",
        epilog="exit codes: 0 done, 1 an error, 2 wrong arguments, 130 stopped by Ctrl-C",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="default", help="GGUF file or a name of the catalogue")
    model.add_argument(
        "--drafter", default="auto", help="auto, lookup, none, or a drafter's GGUF file"
    )
    model.add_argument("--ctx", type=int, default=4096, help="tokens the context holds")
    model.add_argument("--speculation", choices=("auto", "always", "off"), default="auto")
    model.add_argument("--threads", type=int, help="default: the physical cores")
    model.add_argument("--gpu-layers", type=int, help="default: -1, all")
    sampling = parser.add_argument_group("sampling")
    # None where it is not given: a session's own value holds then.
    sampling.add_argument("--temperature", type=float, help="default: 0.7")
    sampling.add_argument("--top-k", type=int, help="default: 0, off")
    sampling.add_argument("--top-p", type=float, help="default: 1, off")
    sampling.add_argument("--min-p", type=float, help="default: 0, off")
    sampling.add_argument("--seed", type=int, help="same seed, same text")
    sampling.add_argument("--max-tokens", type=int, help="longest reply")
    chat = parser.add_argument_group("conversation")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--prompt", help="reply to this and leave; standard input is not read then")
    chat.add_argument("--json", action="store_true", help="one JSON object: text and statistics")
    chat.add_argument(
        "--context",
        choices=("drop", "stop"),
        default="drop",
        help="when it is full: drop the oldest turns, or stop and say so",
    )
    chat.add_argument(
        "--thoughts",
        choices=("show", "hide"),
        help="<think> parts; default: shown on a terminal only",
    )
    chat.add_argument(
        "--session",
        metavar="NAME",
        help="begin with a saved session; --system and what "
        "is given of sampling hold before its own",
    )
    chat.add_argument("--trace", help="new file for one JSON line per round; see bench explain")
    chat.add_argument("--no-history", action="store_true", help="keep no history of what you type")
    return parser


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the command line has."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """How replies are sampled. Raises ValueError."""
    return SamplingParams(**given_sampling(args))


def drafter_for(args: argparse.Namespace, model: str) -> str:
    """The drafter to ask for: the one that was named belongs to the model that was named."""
    is_any_models = model == args.model or args.drafter in ("none", "lookup")
    return str(args.drafter) if is_any_models else "auto"
