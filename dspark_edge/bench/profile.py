"""bench profile: what passes of a target cost here, as a file that `bench replay --cost` reads.

The measuring is the engine's own (cost.py), done anew; this is the command, its table and file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from ..arguments import check_threads
from ..sequence import SamplingParams
from .machine import describe_machine
from .measure import run_group
from .modes import Opened, Setup, open_mode, parse_modes
from .output import check_place
from .run_plot import check_plot, plot_cost
from .shared import Commands, say

PROMPT = "Describe a walk through a town that you know well, street by street."
N_TOKENS = 32  # of the reply that shows the own time of a round


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Time passes of all widths, then a short reply for the own time; a named cost table."""
    if args.sequences < 1:
        raise ValueError(f"--sequences is {args.sequences}; it must be at least 1")
    check_threads(args.threads)
    check_place("--json", args.json)
    check_plot(args.plot)
    with tempfile.TemporaryDirectory() as empty:  # whatever the cache holds is not asked
        report = _measure(args, Path(empty))
    print_cost(report)
    return report


def _measure(args: argparse.Namespace, cost_cache: Path) -> dict[str, Any]:
    setup = Setup(
        target=args.target,
        drafter=args.drafter,
        n_ctx=args.n_ctx,
        n_threads=args.threads,
        cost_cache=cost_cache,
    )
    say(f"loading {args.target} and timing its passes, a few seconds of them at most")
    opened = open_mode(parse_modes("auto")[0], setup, args.sequences)
    with opened.engine as engine:
        for notice in engine.notices:
            say(notice)
        table = opened.cost  # before rounds correct it
        if not table["verify"]:
            raise ValueError(f"nothing is timed for {args.target}: {engine.speculation_state}")
        machine = describe_machine()
        return {
            "name": f"{Path(engine.target_name).stem} on {machine['cpu']}",
            "source": (
                f"{engine.target_name} with {engine.drafter_name}, measured on {machine['cpu']}, "
                f"{args.sequences} sequence(s), llama-cpp-python {machine['llama_cpp']}"
            ),
            "measured": True,
            "assumption": None,
            "table": table | {"other_s": _own_s(opened)},
            "machine": machine,
            "target": engine.target_name,
            "drafter": engine.drafter_name,
            "notices": engine.notices,
        }


def _own_s(opened: Opened) -> float:
    """Seconds of a round outside llama.cpp, mean over a short reply."""
    engine = opened.engine
    params = SamplingParams(max_tokens=N_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
    stats = run_group(engine, [engine.tokenize(PROMPT)], [params]).stats[0]
    return stats.own_s / stats.n_rounds


def print_cost(report: dict[str, Any]) -> None:
    """The curve for people."""
    say(f"\n{report['source']}")
    for curve in report["table"]["verify"].values():
        one_ms = 1e3 * curve["1"]
        say(f"  {'batch_tokens':>12}{'ms':>9}{'x of one':>10}")
        for width, seconds in curve.items():
            say(f"  {width:>12}{1e3 * seconds:9.2f}{1e3 * seconds / one_ms:10.2f}")
    for n_seq, seconds in report["table"]["draft"].items():
        say(f"  draft pass, {n_seq} sequence(s): {1e3 * seconds:.2f} ms")
    say(f"  own time of a round: {1e3 * report['table']['other_s']:.3f} ms")


def add_commands(commands: Commands) -> None:
    """Adds `profile`."""
    command = commands.add_parser("profile", help="what passes of a target cost here")
    command.set_defaults(run=profile, draw=plot_cost)
    command.add_argument("--target", default="default")
    command.add_argument("--drafter", default="auto")
    command.add_argument("--sequences", type=int, default=1, help="more of them time wider passes")
    command.add_argument("--threads", type=int, default=None)
    command.add_argument("--ctx", "--n-ctx", dest="n_ctx", type=int, default=2048)
    command.add_argument("--json", type=Path, default=None, metavar="FILE")
    command.add_argument("--plot", type=Path, default=None, metavar="FILE")
