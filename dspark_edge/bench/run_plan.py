"""What bench run is to do: its options, checked.

Refuses to know how it is done.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arguments import check_ctx, check_threads
from ..sequence import SamplingParams
from .modes import NAMES, BenchMode, Setup, parse_modes
from .prompt_sets import OWN_SETS, PromptSet, in_groups, load_prompt_set
from .ratios import ALL
from .shared import say

MAX_TOKENS, REPEATS = 128, 5  # where nothing else is asked for
QUICK = {"max_prompts": 2, "max_tokens": 32, "repeats": 3}
QUICK_S = 30.0  # after which no repeat begins: the last one and the memory's processes come on top
DEFAULT_MODES = "plain,fixed:3,fixed:max,lookup,auto"
MIN_TOKENS = 2  # the clock starts after the first
MAX_COOL_DOWN_S = 3600.0


@dataclass(slots=True)
class Plan:
    """What is to be run, checked."""

    modes: list[BenchMode]
    sets: list[PromptSet]
    sequences: list[int]
    setup: Setup
    max_tokens: int
    temperature: float
    seed: int
    repeats: int
    cool_down_s: float
    ignore_eos: bool
    is_fresh: bool
    max_s: float  # from the start; no repeat but the first begins later

    @property
    def settings(self) -> dict[str, Any]:
        """What every report says of it, as plain data."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "repeats": self.repeats,
            "cool_down_s": self.cool_down_s,
            "n_ctx": self.setup.n_ctx,
            "threads": self.setup.n_threads,
        }

    def repeat_numbers(
        self, start_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[int]:
        """One number for each repeat; says so when time ends them early. start_s: by the clock."""
        for number in range(self.repeats):
            if number and clock() - start_s > self.max_s:
                say(f"{number} of {self.repeats} repeats: {self.max_s:g} s are over")
                return
            yield number

    def params(self, prompt: int, max_tokens: int) -> SamplingParams:
        """The same for a prompt in each mode and repeat."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed + prompt,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
        )

    @property
    def n_runs(self) -> int:
        """Groups to run, over all modes and repeats."""
        n_groups = sum(len(in_groups(len(s.texts), n)) for n in self.sequences for s in self.sets)
        return n_groups * len(self.modes) * self.repeats


def make_plan(args: argparse.Namespace) -> Plan:
    """The arguments, checked. Raises ValueError, OSError."""
    usual = {"max_prompts": None, "max_tokens": MAX_TOKENS, "repeats": args.usual_repeats}
    for name, value in (QUICK if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not 0.0 <= args.cool_down <= MAX_COOL_DOWN_S:
        raise ValueError(f"--cool-down is {args.cool_down}; give 0 to {MAX_COOL_DOWN_S:g} seconds")
    check_ctx(args.n_ctx)
    check_threads(args.threads)
    minima = {"max_tokens": MIN_TOKENS, "repeats": 1, "max_prompts": 1}
    for name, least in minima.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {value}; it must be at least {least}")
    args.prompts = args.prompts or ["chat"]
    sets = [load_prompt_set(name, args.max_prompts) for name in args.prompts]
    names = [each.name for each in sets]
    repeated = next((name for name in names if [*names, ALL].count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"--prompts {repeated} is taken twice; each set needs a name of its own")
    return Plan(
        modes=parse_modes(args.modes),
        sets=sets,
        sequences=counts(args.sequences, "--sequences"),
        setup=Setup(
            target=args.target,
            drafter=args.drafter,
            n_ctx=args.n_ctx,
            n_threads=args.threads,
            cost_cache=args.cost_cache,
        ),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        repeats=args.repeats,
        cool_down_s=args.cool_down,
        ignore_eos=args.ignore_eos,
        is_fresh=args.fresh,
        max_s=QUICK_S if args.quick else math.inf,
    )


def counts(text: str, flag: str) -> list[int]:
    """Numbers of a comma-separated list, each once. Raises ValueError naming the flag."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"{flag} is {text!r}; give numbers such as 1,2,4,8")
    return list(dict.fromkeys(int(part) for part in parts))


def _quick_words() -> str:
    options = [f"--{name.replace('_', '-')} {value}" for name, value in QUICK.items()]
    return ", ".join([*options, f"and no repeat begins after {QUICK_S:g} s"])


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds what a plan of bench run is made of."""
    add_common_options(command, DEFAULT_MODES)
    add = command.add_argument
    add("--sequences", default="1", help="requests side by side, comma-separated")
    add("--ignore-eos", action="store_true", help="replies of --max-tokens each")
    add("--fresh", action="store_true", help="new engines for every repeat")


def add_common_options(command: argparse.ArgumentParser, modes: str) -> None:
    """Adds what every plan with modes of one process has. modes: the default of --modes."""
    add_load_options(command)
    add = command.add_argument
    add("--modes", default=modes, help=f"comma-separated, of {NAMES}")
    add("--cost-cache", type=Path, default=None, metavar="FOLDER")


def add_load_options(command: argparse.ArgumentParser, repeats: int = REPEATS) -> None:
    """Adds what every plan has: files, prompts, replies, repeats. repeats: the usual number."""
    command.set_defaults(usual_repeats=repeats)
    add = command.add_argument
    add("--target", default="default")
    add("--drafter", default="auto")
    add("--prompts", action="append", metavar="SET", help=f"{', '.join(OWN_SETS)} or a file")
    add("--max-tokens", type=int, default=None, help=f"of each reply; {MAX_TOKENS}")
    add("--max-prompts", type=int, default=None, help="of each set")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of the first prompt; each next has one more")
    add("--repeats", type=int, default=None, help=f"of each mode; {repeats}")
    add("--cool-down", type=float, default=0.0, metavar="SECONDS", help="before each run")
    add("--threads", type=int, default=None)
    add("--ctx", "--n-ctx", dest="n_ctx", type=int, default=2048, help="tokens of one sequence")
    add("--quick", action="store_true", help=f"a first impression: {_quick_words()}")
