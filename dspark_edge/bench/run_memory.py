"""Peak memory of each mode of bench run: each in a fresh process, since a peak never falls.

Owns the command that such a process runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any, TypeAlias

from .measure import run_group
from .modes import open_mode
from .prompt_sets import in_groups, tokenize
from .run_plan import Plan, add_options, make_plan
from .shared import Commands, peak_rss_bytes, progress, said_last, say

N_TOKENS = 8  # of each reply, at most: caches and buffers are whole from the start

Peaks: TypeAlias = dict[tuple[str, int], int | None]  # by mode and number of sequences, in bytes


def peaks(plan: Plan, args: argparse.Namespace) -> Peaks:
    """Peak resident bytes of a fresh process for each mode and number of sequences.

    None, with a word on why, where that process failed: what was measured before is not lost.
    """
    found: Peaks = {}
    with progress(len(plan.modes) * len(plan.sequences), "peak memory") as advance:
        for mode in plan.modes:
            for n_seq in plan.sequences:
                found[mode.name, n_seq] = _peak_in_process(args, plan, mode.name, n_seq)
                advance()
    return found


def add_memory(report: dict[str, Any], found: Peaks) -> None:
    """Puts the peaks into the report's rows; None where there is none."""
    for line in report["modes"]:
        line["peak_rss_bytes"] = found.get((line["mode"], line["sequences"]))


def _peak_in_process(args: argparse.Namespace, plan: Plan, mode: str, n_seq: int) -> int | None:
    command = [sys.executable, "-m", "dspark_edge.bench", "memory", "--modes", mode]
    command += ["--target", args.target, "--drafter", args.drafter, "--sequences", str(n_seq)]
    command += ["--prompts", args.prompts[0], "--max-tokens", str(min(N_TOKENS, plan.max_tokens))]
    command += ["--n-ctx", str(args.n_ctx), "--max-prompts", str(n_seq)]
    command += [] if args.threads is None else ["--threads", str(args.threads)]
    command += [] if args.cost_cache is None else ["--cost-cache", str(args.cost_cache)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        say(f"no peak memory of {mode}: its process {said_last(done)}")
        return None
    return int(json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"])


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one group in this process and reports its peak resident memory."""
    plan = make_plan(args)
    n_seq = plan.sequences[0]
    with open_mode(plan.modes[0], plan.setup, n_seq).engine as engine:
        prompts = tokenize(engine, plan.sets[0], plan.max_tokens)
        group = in_groups(len(prompts), n_seq)[0]
        params = [plan.params(i, plan.max_tokens) for i in group]
        run_group(engine, [prompts[i] for i in group], params)
        return {"peak_rss_bytes": peak_rss_bytes()}


def add_commands(commands: Commands) -> None:
    """Adds `memory`, which run calls."""
    command = commands.add_parser("memory", help="peak memory of one mode, for run")
    command.set_defaults(run=memory)
    add_options(command)
