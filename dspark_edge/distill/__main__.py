"""python -m dspark_edge.distill: a drafter for your own model, made on your own machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DsparkError
from ..models import target_path
from ..sessions import SessionStore
from .my_chats import read_chats

if TYPE_CHECKING:
    from .options import Options
    from .settings import DataSettings

MAX_TEMPERATURE = 5.0  # beyond, replies are noise
STOPPED = 130  # what a shell gives for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for our errors, 130 when it was stopped."""
    args = _parser().parse_args(argv)
    try:
        from .pipeline import distill
    except ModuleNotFoundError as error:
        print(f'error: {error}; pip install "dspark-edge[distill]" brings it', file=sys.stderr)
        return 1
    try:
        distill(_options(args))
    except (DsparkError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    return 0


def _options(args: argparse.Namespace) -> Options:
    from .options import Options
    from .prompts import read_given
    from .settings import TrainSettings

    if not 0.0 < args.hours <= 24 * 365:
        raise ValueError(f"--hours is {args.hours:g}; it must be above 0")
    out = args.out.expanduser()
    if out.suffix != ".gguf":
        raise ValueError(f"--out is {out}; its name must end in .gguf")
    return Options(
        target=target_path(args.target),
        out=out,
        work=args.work or out.with_suffix(".work"),
        hours=args.hours,
        given=[*(text for path in args.prompts for text in read_given(path)), *_my_chats(args)],
        from_chats=args.my_chats,
        n_threads=args.threads,
        disk_bytes=int(args.disk_gb * (1 << 30)),
        kind=args.type,
        n_draft_max=args.draft_vocab,
        n_layer=args.layers,
        block_size=args.block_size,
        rank=args.rank,
        taps=tuple(args.taps) if args.taps else None,
        start=args.start_from,
        device=args.device,
        precision=args.precision,
        max_sequences=args.max_sequences,
        max_steps=args.max_steps,
        n_trial_prompts=args.trial_prompts,
        data=_data(args),
        training=TrainSettings(checkpoint_s=60.0 * args.checkpoint_minutes),
    )


def _data(args: argparse.Namespace) -> DataSettings:
    from .settings import DataSettings

    if not 0.0 <= args.drawn_share <= 1.0:
        raise ValueError(f"--drawn-share is {args.drawn_share:g}; it must be from 0 to 1")
    temperatures = tuple(args.temperatures or DataSettings().temperatures)
    for temperature in temperatures:
        if not 0.0 <= temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"--temperatures has {temperature:g}; each must be from 0 to {MAX_TEMPERATURE:g}"
            )
    return DataSettings(
        n_seq=args.sequences,
        max_reply=args.reply_tokens,
        temperatures=temperatures,
        drawn_share=args.drawn_share,
    )


def _my_chats(args: argparse.Namespace) -> list[str]:
    """The user's turns, where he asked for them; says what was found."""
    if not args.my_chats:
        return []
    store = SessionStore()
    chats = read_chats(store)
    for line in chats.unread:
        print(f"left out: {line}", file=sys.stderr)
    print(
        f"--my-chats: {len(chats.turns)} different turns of yours in {chats.n_sessions} sessions "
        f"of {store.folder}; they stay on this machine, and the work folder holds what the target "
        "replies to them until you remove it",
        file=sys.stderr,
    )
    return chats.turns


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark-edge distill",
        description="Trains a drafter on what a GGUF model itself writes.",
    )
    add = parser.add_argument
    add("--target", required=True, help=TARGET_HELP)
    add("--out", type=Path, required=True, metavar="FILE.gguf")
    add("--hours", type=float, default=2.0, help="all stages together, over all starts")
    add("--prompts", type=Path, action="append", default=[], metavar="FILE", help=PROMPTS_HELP)
    add("--my-chats", action="store_true", help=MY_CHATS_HELP)
    add("--work", type=Path, help="folder of data and checkpoints; default: beside --out")
    add("--threads", type=_at_least_one, default=max(1, (os.cpu_count() or 2) - 1))
    add("--disk-gb", type=float, default=20.0, help="what the data may take")
    add("--type", choices=("q8_0", "f16"), default="q8_0", help="of the drafter's matrices")
    add("--draft-vocab", type=_at_least_one, default=8192, help="tokens it can draft at most")
    add("--layers", type=_at_least_one, default=2)
    add("--block-size", type=_at_least_one, default=4)
    add("--rank", type=_at_least_one, default=64, help="of the Markov head")
    add("--taps", type=int, nargs="+", metavar="LAYER", help=TAPS_HELP)
    add("--start-from", type=Path, metavar="FILE.gguf", help="a drafter to go on from")
    add("--temperatures", type=float, nargs="+", metavar="T", help=TEMPERATURES_HELP)
    add("--drawn-share", type=float, default=0.5, help=DRAWN_SHARE_HELP)
    add("--sequences", type=_at_least_one, default=32, help="sampled side by side")
    add("--checkpoint-minutes", type=float, default=2.0, help="between two of them")
    add("--device", default="auto", help="of PyTorch: auto, cpu, cuda, mps")
    add("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help=PRECISION_HELP)
    add("--reply-tokens", type=_at_least_one, default=320, help="of a sampled reply at most")
    add("--max-sequences", type=_at_least_one, help="replies to sample, if the time allows")
    add("--trial-prompts", type=_at_least_one, default=12, help="measured of each set at most")
    add("--max-steps", type=_at_least_one, help="of training, if the time allows")
    return parser


TARGET_HELP = (
    "a GGUF file, or a name of the catalogue; where many sequences side by side are slow in its "
    "format, give a copy (llama-quantize --allow-requantize IN OUT Q8_0): its drafter fits both"
)
PROMPTS_HELP = (
    "prompts to mix in: JSON lines, or a prompt a line; may be given again. Whoever gets the "
    "lookup cache can read the replies, and the last words of their prompts"
)
TAPS_HELP = "target layers that it reads; default: evenly spread, or those of --start-from"
TEMPERATURES_HELP = "of the sampled replies, each with one of them; default: 0 0.6 0.8 1"
DRAWN_SHARE_HELP = "of the prompts, drawn from the target where others are given; default: half"
PRECISION_HELP = "of products in training; auto: bfloat16 where this CPU is faster at it"
MY_CHATS_HELP = (
    "mix in what you wrote in your saved chats; the drafter's file names none of it, and no lookup "
    "cache is made: that would hold the replies"
)

if __name__ == "__main__":
    sys.exit(main())
